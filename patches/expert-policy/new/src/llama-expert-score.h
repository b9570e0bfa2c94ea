// SPDX-License-Identifier: MIT

// How often will each expert of a layer be used in the next tokens? Seen are only the uses so far.
//
// Five guesses of the chance that the next token uses expert e:
//
//   faded uses       sum of the uses, halved every window/32, window/8, window and 64 windows, per token: four guesses, from
//                    what goes on now to what was used all the time
//   what follows     how often e was used by the token after one that used x, averaged over the experts x of the last token
//
//   score[e] = window * max(sum of weight[k] * guess[k][e], half of the last faded one)        unit: uses in `window` tokens
//
// The weights are fitted while the model runs, by least squares of what the guesses said on what the next FIT_EVERY tokens used:
// where routing jumps, the last tokens weigh most, where it is steady, the long sums do.

#pragma once

#include <cstdint>
#include <vector>

struct llama_expert_score {
    static constexpr int N_FADED  = 4;
    static constexpr int I_RECENT = 2;
    static constexpr int I_LIFE   = 3;
    static constexpr int I_FOLLOW = 4;
    static constexpr int N_GUESS  = 5;

    // phase: tokens by which the fit of this layer is ahead of others', so that not all fit in one step
    llama_expert_score(int32_t n_expert, int32_t window, int32_t phase);

    void use(const int32_t * ids, int32_t n_used, float weight); // of one token; ids are valid
    void step(int32_t n_tokens);

    std::vector<float> score; // as of the last step
    std::vector<float> life;  // all uses since the start
    std::vector<float> weight;

private:
    int32_t n_expert;
    int32_t window;
    float   n_used   = 0.0f; // most of a token
    int32_t n_fit    = 0;    // tokens in `target`
    bool    ready    = false; // there is a guess to compare with

    struct one_use { int32_t expert; float weight; };
    std::vector<one_use>  now;               // of this step
    std::vector<float>    faded[N_FADED];    // sums of uses, one is `unit`
    float                 unit[N_FADED];
    float                 grow[N_FADED];     // of the unit, in a step of n_last tokens
    int32_t               n_last = 0;
    float                 seen[N_FADED];     // tokens in `faded`, faded alike
    std::vector<uint16_t> pairs;             // [n_expert][n_expert] uses by the token after one that used the first
    std::vector<uint16_t> n_pairs;           // [n_expert] tokens after one that used the first
    std::vector<int32_t>  before;            // experts of the last token

    std::vector<float>    said[N_GUESS];     // the guesses when `target` began
    std::vector<float>    target;            // uses since then
    std::vector<double>   gram;              // [N_GUESS][N_GUESS] sums of guess*guess, faded
    std::vector<double>   match;             // [N_GUESS] sums of guess*target, faded

    void learn(const int32_t * ids, int32_t n_used);
    void fade(int k);
    void add_follow(std::vector<float> & out, float factor) const;
    void rate();
    void fit();
};
