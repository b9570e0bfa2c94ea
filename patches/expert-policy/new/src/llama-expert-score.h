// SPDX-License-Identifier: MIT

// How often will each expert of a layer be used in the next tokens? Seen are only the uses so far.
//
// Five guesses of the chance that the next token uses expert e:
//
//   faded uses       sum of the uses, halved every window/32, window/8 and window tokens, per token: three guesses
//   all uses         per token since the start
//   what follows     how often e was used by the token after one that used x, for the experts x of the last token, averaged;
//                    each token before it counts a quarter
//
//   score[e] = window * max(sum of weight[k] * guess[k][e], half of all uses per token)        unit: uses in `window` tokens
//
// The weights are fitted while the model runs, by least squares of what the guesses said on what the next FIT_EVERY tokens used:
// where routing jumps, the last tokens weigh most, where it is steady, the long sums do.

#pragma once

#include <cstdint>
#include <vector>

struct llama_expert_score {
    static constexpr int N_FADED  = 3;
    static constexpr int N_GUESS  = N_FADED + 2;
    static constexpr int I_LIFE   = N_FADED;
    static constexpr int I_FOLLOW = N_FADED + 1;

    // phase: tokens by which the fit of this layer is ahead of others', so that not all fit in one step
    llama_expert_score(int32_t n_expert, int32_t window, int32_t phase);

    void use(const int32_t * ids, int32_t n_used, float weight); // of one token; ids are valid
    void step(int32_t n_tokens);

    std::vector<float> score; // as of the last step
    std::vector<float> life;  // all uses
    std::vector<float> weight;

private:
    int32_t n_expert;
    int32_t window;
    float   n_used   = 0.0f; // most of a token
    float   n_tokens = 0.0f;
    int32_t n_fit    = 0;    // tokens in `target`
    bool    ready    = false; // there is a guess to compare with

    std::vector<float> now;                  // uses of this step
    std::vector<float> faded[N_FADED];
    float              seen[N_FADED];        // tokens in `faded`, faded alike
    std::vector<float> pairs;                // [n_expert][n_expert] uses by the token after one that used the first
    std::vector<float> n_pairs;              // [n_expert] tokens after one that used the first
    std::vector<int32_t> before;             // experts of the last token
    std::vector<float> follow;
    float follow_all     = 0.0f;             // experts that `follow` is the sum of
    float follow_unknown = 0.0f;             // the part of them of which too little is known

    std::vector<float>  guess[N_GUESS];
    std::vector<float>  said [N_GUESS];      // the guesses when `target` began
    std::vector<float>  target;              // uses since then
    std::vector<double> gram;                // [N_GUESS][N_GUESS] sums of guess*guess, faded
    std::vector<double> match;               // [N_GUESS] sums of guess*target, faded

    void learn (const int32_t * ids, int32_t n_used);
    void expect(const int32_t * ids, int32_t n_used);
    void make_guesses();
    void fit();
};
