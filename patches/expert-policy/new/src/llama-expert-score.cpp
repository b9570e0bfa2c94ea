// SPDX-License-Identifier: MIT

#include "llama-expert-score.h"

#include <algorithm>
#include <cmath>

static const int32_t FIT_EVERY     = 4;      // tokens
static const float   FIT_MEMORY    = 256;    // tokens, half-life of what the fit knows
static const double  FIT_START     = 2.0;    // weight of the start values, as of so many fits of even use
static const float   TOKENS_START  = 4.0f;   // tokens without uses, so that the first uses are not taken for the rule
static const float   PAIRS_START   = 8.0f;   // what follows an expert is what was used lately, as if seen so many times
static const uint16_t PAIRS_MAX    = 512;    // a row of pairs is halved there: what followed long ago is forgotten
static const float   LIFE_LEAST    = 0.5f;   // what was used much will be again: a score is at least this share of it

static const float GROW_MAX = 50.0f; // doublings in a step: nothing is left of what was before
static const float HALF_LIFE[llama_expert_score::N_FADED] = { 1.0f/32, 1.0f/8, 1.0f, 64.0f }; // windows
static const float WEIGHT_START[llama_expert_score::N_GUESS] = { 0.0f, 0.2f, 0.3f, 0.0f, 0.5f };

llama_expert_score::llama_expert_score(int32_t n_expert, int32_t window, int32_t phase) : n_expert(n_expert), window(window) {
    for (auto * v : { &score, &life, &target }) {
        v->assign(n_expert, 0.0f);
    }
    for (int k = 0; k < N_FADED; k++) {
        faded[k].assign(n_expert, 0.0f);
        seen[k] = TOKENS_START;
        unit[k] = 1.0f;
    }
    for (auto & v : said) {
        v.assign(n_expert, 0.0f);
    }
    pairs.assign((size_t) n_expert*n_expert, 0);
    n_pairs.assign(n_expert, 0);
    weight.assign(WEIGHT_START, WEIGHT_START + N_GUESS);
    gram.assign(N_GUESS*N_GUESS, 0.0);
    match.assign(N_GUESS, 0.0);
    n_fit = phase % FIT_EVERY;
}

void llama_expert_score::use(const int32_t * ids, int32_t n_used, float weight) {
    for (int32_t i = 0; i < n_used; i++) {
        now.push_back({ ids[i], weight });
        life[ids[i]]   += weight;
        target[ids[i]] += weight;
    }
    this->n_used = std::max(this->n_used, (float) n_used);
    if (weight >= 1.0f) { // nothing follows a rejected draft
        learn(ids, n_used);
    }
}

// this token follows the one before it
void llama_expert_score::learn(const int32_t * ids, int32_t n_used) {
    for (const int32_t first : before) {
        uint16_t * row = pairs.data() + (size_t) first*n_expert;
        for (int32_t i = 0; i < n_used; i++) {
            row[ids[i]]++;
        }
        if (++n_pairs[first] >= PAIRS_MAX) {
            for (int32_t e = 0; e < n_expert; e++) {
                row[e] /= 2;
            }
            n_pairs[first] /= 2;
        }
    }
    before.assign(ids, ids + n_used);
}

void llama_expert_score::step(int32_t n) {
    for (int k = 0; k < N_FADED; k++) {
        if (n != n_last) {
            grow[k] = std::exp2(std::min(GROW_MAX, n/(HALF_LIFE[k]*window)));
        }
        fade(k);
        seen[k] = seen[k]/grow[k] + n;
    }
    n_last = n;
    now.clear();
    n_fit += n;
    if (n_fit >= FIT_EVERY) {
        if (ready && n_used > 0.0f) {
            fit();
        }
        for (int k = 0; k < N_FADED; k++) {
            const float scale = 1.0f/(unit[k]*seen[k]);
            for (int32_t e = 0; e < n_expert; e++) {
                said[k][e] = faded[k][e]*scale;
            }
        }
        std::fill(said[I_FOLLOW].begin(), said[I_FOLLOW].end(), 0.0f);
        add_follow(said[I_FOLLOW], 1.0f);
        std::fill(target.begin(), target.end(), 0.0f);
        n_fit = 0;
        ready = true;
    }
    rate();
}

// instead of halving the old sums, what is added is doubled
void llama_expert_score::fade(int k) {
    unit[k] *= grow[k];
    if (unit[k] > 1e18f) {
        for (float & x : faded[k]) {
            x /= unit[k];
        }
        unit[k] = 1.0f;
    }
    for (const auto & u : now) {
        faded[k][u.expert] += u.weight*unit[k];
    }
}

void llama_expert_score::add_follow(std::vector<float> & out, float factor) const {
    const float each = before.empty() ? 0.0f : 1.0f/before.size();
    float unknown = before.empty() ? 1.0f : 0.0f; // share of which too little is known
    const size_t n = before.size();
    for (size_t i = 0; i < n; i += 4) { // four rows at once, the last ones with nothing: it is the time of this class
        const uint16_t * row[4];
        float share[4] = {};
        for (size_t k = 0; k < 4; k++) {
            const int32_t first = before[std::min(i + k, n - 1)];
            row[k] = pairs.data() + (size_t) first*n_expert;
            if (i + k < n) {
                share[k] = factor*each/(n_pairs[first] + PAIRS_START);
                unknown += PAIRS_START*each/(n_pairs[first] + PAIRS_START);
            }
        }
        float * to = out.data();
        for (int32_t e = 0; e < n_expert; e++) {
            to[e] += share[0]*row[0][e] + share[1]*row[1][e] + share[2]*row[2][e] + share[3]*row[3][e];
        }
    }
    const float scale = factor*unknown/(unit[I_RECENT]*seen[I_RECENT]);
    for (int32_t e = 0; e < n_expert; e++) {
        out[e] += scale*faded[I_RECENT][e];
    }
}

void llama_expert_score::rate() {
    float scale[N_FADED];
    for (int k = 0; k < N_FADED; k++) {
        scale[k] = window/(unit[k]*seen[k]);
    }
    static_assert(N_FADED == 4, "one term for each sum");
    const float w[] = { scale[0]*weight[0], scale[1]*weight[1], scale[2]*weight[2], scale[3]*weight[3] };
    for (int32_t e = 0; e < n_expert; e++) {
        score[e] = w[0]*faded[0][e] + w[1]*faded[1][e] + w[2]*faded[2][e] + w[3]*faded[3][e];
    }
    add_follow(score, window*weight[I_FOLLOW]);
    const float least = LIFE_LEAST*scale[I_LIFE];
    for (int32_t e = 0; e < n_expert; e++) {
        score[e] = std::max(score[e], least*faded[I_LIFE][e]);
    }
}

// in eight lanes, which a compiler may keep in vectors: it must not reorder sums by itself
static float dot(const std::vector<float> & a, const std::vector<float> & b) {
    float lane[8] = {};
    const size_t n = a.size();
    for (size_t i = 0; i + 8 <= n; i += 8) {
        for (size_t k = 0; k < 8; k++) {
            lane[k] += a[i + k]*b[i + k];
        }
    }
    for (size_t i = n - n % 8; i < n; i++) {
        lane[0] += a[i]*b[i];
    }
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

// weights for which what was said is nearest to what came: (gram + start) * weight = match + start * WEIGHT_START
void llama_expert_score::fit() {
    const double fade  = std::exp2(-(double) n_fit/FIT_MEMORY);
    const double start = FIT_START*n_used*n_used/n_expert;
    double a[N_GUESS][N_GUESS + 1];
    for (int k = 0; k < N_GUESS; k++) {
        for (int m = 0; m <= k; m++) {
            gram[k*N_GUESS + m] = gram[k*N_GUESS + m]*fade + dot(said[k], said[m]);
            a[k][m] = a[m][k] = gram[k*N_GUESS + m];
        }
        match[k] = match[k]*fade + dot(said[k], target)/n_fit;
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
