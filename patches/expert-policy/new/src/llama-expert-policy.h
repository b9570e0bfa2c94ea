// SPDX-License-Identifier: MIT

// Which experts of which layers should be in the slots of a device: the decision alone, no memory and no copies.
//
// A token uses n_used experts in each layer; one that sits in a slot is a hit. An upload fills a slot, in place of a victim or
// not. The caller tells of every use, ends a step (one batch of decoded tokens), and asks for the uploads to begin:
//
//   use() for all layers and tokens -> step() -> plan() -> ... the bytes are copied ... -> landed() or failed()
//
// The score of an expert is the number of uses expected in the next `window` tokens (llama-expert-score.h), and uses are the
// unit of leads and margins. Free slots are filled by score. A victim goes only for an expert that the last step used, which
// leads it by
//
//   max(margin, time of the upload / time that a hit saves, price)
//
// uses. price rises with each eviction and falls with each hit of the layer, so that in the long run a layer gets `earn` hits for
// each eviction: where routing is noise there is nothing to win, and little is uploaded. Hits are saved up, at most for an
// exchange of all slots, which a change of topic needs at once. A slot is not evicted in its first
// `dwell` tokens, nor when its expert was used in the last step. Layers take turns, one upload each, until the budget is spent.
//
// Budget: each step adds swap_frac of its time to what the link may spend, each upload takes its own time from it; what is left
// over is kept for a few steps. Before both times are known, 4 uploads a step. A hit saves at most the time of a step divided by
// its misses.
//
// Not thread safe. A step costs O(n_used*n_expert) for each layer, an upload O(n_expert); memory is
// O(n_expert*n_expert) for each layer.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

struct llama_expert_policy_params {
    enum kind { SCORE, LRU };

    kind    type          = SCORE; // LRU: every miss comes in, in place of what was used longest ago, within the budget (to compare with)
    int32_t window        = 64;    // tokens
    float   margin        = 1.0f;  // how far, in uses, a newcomer has to lead its victim
    float   swap_frac     = 0.25f; // uploads take at most this share of the measured time of steps
    float   sticky        = 0.0f;  // share of a layer's slots reserved for its most used experts since the start (not evicted)
    int32_t budget        = 0;     // most uploads in a step, over all layers; 0: from measured times
    bool    deterministic = false; // plan depends on the ids alone: fixed budget of 8 a step, margin 4, no measured times

    int32_t dwell         = 2;     // tokens that a slot keeps its expert at least
    float   earn          = 6.0f;  // hits that a layer has to bring for each eviction; 0: no such limit
};

// one per device; its layers share one link
class llama_expert_policy {
public:
    struct layer { int32_t n_expert; int32_t n_slots; uint64_t bytes; }; // bytes of one expert, all projections
    struct swap  { int32_t layer; int32_t expert; int32_t slot; int32_t victim; }; // victim -1: the slot was free

    // of one layer, since the start
    struct counts { uint64_t lookups; uint64_t hits; uint64_t planned; uint64_t evicted; uint64_t failed; };

    llama_expert_policy(const llama_expert_policy_params & params, const std::vector<layer> & layers);
    ~llama_expert_policy();

    // one token's experts (all of them, hit or miss), tokens in order; weight < 1 for a rejected draft; negative ids are ignored
    void use(int32_t layer, const int32_t * ids, int32_t n_used, float weight = 1.0f);

    // the uses of a step of n_tokens are in
    void step(int32_t n_tokens);

    // uploads to begin now; victims are unmapped from here on, slots are in flight
    // deterministic: all swaps of the last plan have landed or failed before the next one is asked for
    std::vector<swap> plan();

    void landed(const swap & s); // all its bytes are there: mapped
    void failed(const swap & s); // the slot is free again; the expert is left alone for `window` tokens

    void time_step  (int64_t us);                 // of a whole decode step, from its first token in to the next step's
    void time_upload(uint64_t bytes, int64_t us); // the link was busy for us with these bytes; several uploads may be told as one

    int32_t slot  (int32_t layer, int32_t expert) const; // -1: not resident (also while in flight)
    int32_t expert(int32_t layer, int32_t slot)   const; // -1: free or in flight

    counts count(int32_t layer)                 const;
    float  score(int32_t layer, int32_t expert) const; // as of the last step
    double step_us()                            const; // smoothed; 0: not measured yet
    double upload_us(uint64_t bytes)            const;

private:
    struct impl;
    std::unique_ptr<impl> self;
};
