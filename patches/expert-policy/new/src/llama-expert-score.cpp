// SPDX-License-Identifier: MIT

#include "llama-expert-score.h"

#include <algorithm>
#include <cmath>

static const int32_t FIT_EVERY     = 4;      // tokens
static const float   FIT_MEMORY    = 256;    // tokens, half-life of what the fit knows
static const double  FIT_START     = 2.0;    // weight of the start values, as of so many fits of even use
static const float   TOKENS_START  = 4.0f;   // tokens without uses, so that the first uses are not taken for the rule
static const float   PAIRS_START   = 8.0f;   // what follows an expert is what is used anyway, as if seen so many times
static const float   PAIRS_MAX     = 512.0f; // a row of pairs is halved there: what followed long ago is forgotten
static const float   LIFE_LEAST    = 0.5f;   // what was used much will be again: a score is at least this share of it
static const float   FOLLOW_FADE   = 0.25f;

static const float HALF_LIFE[llama_expert_score::N_FADED] = { 1.0f/32, 1.0f/8, 1.0f }; // of a window
static const float WEIGHT_START[llama_expert_score::N_GUESS] = { 0.0f, 0.2f, 0.3f, 0.0f, 0.5f };

llama_expert_score::llama_expert_score(int32_t n_expert, int32_t window, int32_t phase) : n_expert(n_expert), window(window) {
    for (auto * v : { &score, &life, &now, &follow, &n_pairs, &target }) {
        v->assign(n_expert, 0.0f);
    }
    for (int k = 0; k < N_FADED; k++) {
        faded[k].assign(n_expert, 0.0f);
        seen[k] = TOKENS_START;
    }
    for (int k = 0; k < N_GUESS; k++) {
        guess[k].assign(n_expert, 0.0f);
        said[k].assign(n_expert, 0.0f);
    }
    pairs.assign((size_t) n_expert*n_expert, 0.0f);
    weight.assign(WEIGHT_START, WEIGHT_START + N_GUESS);
    gram.assign(N_GUESS*N_GUESS, 0.0);
    match.assign(N_GUESS, 0.0);
    n_fit = phase % FIT_EVERY;
}

void llama_expert_score::use(const int32_t * ids, int32_t n_used, float weight) {
    for (int32_t i = 0; i < n_used; i++) {
        now[ids[i]] += weight;
    }
    this->n_used = std::max(this->n_used, (float) n_used);
    if (weight >= 1.0f) { // nothing follows a rejected draft
        learn(ids, n_used);
        expect(ids, n_used);
    }
}

// this token follows the one before it
void llama_expert_score::learn(const int32_t * ids, int32_t n_used) {
    for (const int32_t first : before) {
        float * row = pairs.data() + (size_t) first*n_expert;
        for (int32_t i = 0; i < n_used; i++) {
            row[ids[i]] += 1.0f;
        }
        n_pairs[first] += 1.0f;
        if (n_pairs[first] >= PAIRS_MAX) {
            for (int32_t e = 0; e < n_expert; e++) {
                row[e] *= 0.5f;
            }
            n_pairs[first] *= 0.5f;
        }
    }
    before.assign(ids, ids + n_used);
}

// what will follow this token
void llama_expert_score::expect(const int32_t * ids, int32_t n_used) {
    for (int32_t e = 0; e < n_expert; e++) {
        follow[e] *= FOLLOW_FADE;
    }
    follow_all     *= FOLLOW_FADE;
    follow_unknown *= FOLLOW_FADE;
    for (int32_t i = 0; i < n_used; i++) {
        const float * row   = pairs.data() + (size_t) ids[i]*n_expert;
        const float   share = 1.0f/(n_pairs[ids[i]] + PAIRS_START);
        for (int32_t e = 0; e < n_expert; e++) {
            follow[e] += row[e]*share;
        }
        follow_all     += 1.0f;
        follow_unknown += PAIRS_START*share;
    }
}

void llama_expert_score::step(int32_t n) {
    n_tokens += n;
    for (int k = 0; k < N_FADED; k++) {
        const float fade = std::exp2(-(float) n/(HALF_LIFE[k]*window));
        for (int32_t e = 0; e < n_expert; e++) {
            faded[k][e] = faded[k][e]*fade + now[e];
        }
        seen[k] = seen[k]*fade + n;
    }
    for (int32_t e = 0; e < n_expert; e++) {
        life[e]   += now[e];
        target[e] += now[e];
        now[e]     = 0.0f;
    }
    make_guesses();
    n_fit += n;
    if (n_fit >= FIT_EVERY) {
        if (ready) {
            fit();
        }
        std::swap_ranges(guess, guess + N_GUESS, said);
        std::fill(target.begin(), target.end(), 0.0f);
        n_fit = 0;
        ready = true;
    }
}

void llama_expert_score::make_guesses() {
    for (int k = 0; k < N_FADED; k++) {
        const float scale = 1.0f/seen[k];
        for (int32_t e = 0; e < n_expert; e++) {
            guess[k][e] = faded[k][e]*scale;
        }
    }
    const float all     = 1.0f/(n_tokens + TOKENS_START);
    const float known   = follow_all > 0.0f ? 1.0f/follow_all : 0.0f;
    const float unknown = follow_all > 0.0f ? follow_unknown/follow_all : 1.0f;
    for (int32_t e = 0; e < n_expert; e++) {
        guess[I_LIFE][e]   = life[e]*all;
        guess[I_FOLLOW][e] = follow[e]*known + unknown*guess[N_FADED - 1][e];
    }
    const float * w = weight.data();
    static_assert(N_GUESS == 5, "one line for each guess");
    for (int32_t e = 0; e < n_expert; e++) {
        score[e] = window*(
            w[0]*guess[0][e] +
            w[1]*guess[1][e] +
            w[2]*guess[2][e] +
            w[3]*guess[3][e] +
            w[4]*guess[4][e]);
        score[e] = std::max(score[e], LIFE_LEAST*window*guess[I_LIFE][e]);
    }
}

// weights for which what was said is nearest to what came: (gram + start) * weight = match + start * WEIGHT_START
void llama_expert_score::fit() {
    const double fade = std::exp2(-(double) n_fit/FIT_MEMORY);
    const double start = FIT_START*n_used*n_used/n_expert;
    double a[N_GUESS][N_GUESS + 1];
    for (int k = 0; k < N_GUESS; k++) {
        for (int m = 0; m <= k; m++) {
            float sum = 0.0f;
            for (int32_t e = 0; e < n_expert; e++) {
                sum += said[k][e]*said[m][e];
            }
            gram[k*N_GUESS + m] = gram[k*N_GUESS + m]*fade + sum;
            a[k][m] = a[m][k] = gram[k*N_GUESS + m];
        }
        float sum = 0.0f;
        for (int32_t e = 0; e < n_expert; e++) {
            sum += said[k][e]*target[e];
        }
        match[k] = match[k]*fade + sum/n_fit;
        a[k][N_GUESS] = match[k] + start*WEIGHT_START[k];
    }
    for (int k = 0; k < N_GUESS; k++) {
        a[k][k] += start;
    }
    // symmetric and positive: no pivoting needed
    for (int k = 0; k < N_GUESS; k++) {
        for (int m = k + 1; m < N_GUESS; m++) {
            const double f = a[m][k]/a[k][k];
            for (int i = k; i <= N_GUESS; i++) {
                a[m][i] -= f*a[k][i];
            }
        }
    }
    for (int k = N_GUESS - 1; k >= 0; k--) {
        double sum = a[k][N_GUESS];
        for (int m = k + 1; m < N_GUESS; m++) {
            sum -= a[k][m]*weight[m];
        }
        weight[k] = (float) (sum/a[k][k]);
    }
}
