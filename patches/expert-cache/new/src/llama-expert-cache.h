// SPDX-License-Identifier: MIT
#pragma once

// The expert cache of a context (API: llama-expert-ext.h).
//
//   bank   a tensor of slots on the device of a layer, for one projection of its experts
//   table  expert -> slot, once in host memory and once on each device; both change at the same idle point only
//   hit    an expert that has a slot: the device computes it. The others are misses: the host computes them
//
// A graph of few tokens has both branches in every cached layer (llama-expert-graph.cpp). Which experts hit is in the
// tables alone, so the graph stays the same and tables and banks keep their addresses.

#include "llama-adapter.h"
#include "llama-expert-ext.h"
#include "llama-expert-policy.h"
#include "llama-expert-upload.h"

#include "ggml-cpp.h"

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

struct llama_cparams;
struct llama_model;
struct llama_ubatch;

struct llama_expert_layer;

// Which experts a branch computes, and where their weights are.
struct llama_expert_branch {
    ggml_tensor *              ids;    // [n_used, n_tokens] rows of the weights, -1: none
    bool                       skip;   // some are -1
    const llama_expert_layer * device; // its twins of the weights; nullptr: the model's own

    ggml_tensor * twin(ggml_tensor * t) const;
};

struct llama_expert_layer {
    int32_t il;
    int32_t n_expert;
    int32_t n_used;
    int32_t limit;          // tokens
    int32_t n_slots = 0;
    int32_t i_layer = -1;   // in its device's policy
    bool    skip    = true; // the device knows ids of -1; otherwise misses have a slot of zeros, the last one

    std::vector<ggml_tensor *> weights; // experts of each projection, in host memory
    std::vector<ggml_tensor *> extras;  // their scales and biases
    std::unordered_map<const ggml_tensor *, ggml_tensor *> twins;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    std::vector<int32_t> table;               // [n_expert] slot or -1, for the host
    ggml_tensor *        table_dev = nullptr; // [1, n_expert], a view of its device's
    int64_t              table_at  = 0;       // where, in elements
    ggml_backend_t       backend     = nullptr;
    ggml_backend_t       backend_cpu = nullptr;

    // of the graph that ran last, written by its first thread
    mutable std::vector<int32_t> seen;   // [n_used, n_seen]
    mutable int32_t              n_seen = 0;
    mutable std::atomic<uint64_t> hits{0}, misses{0};

    uint64_t bytes_slot() const; // of one expert, all projections

    using ffn = std::function<ggml_tensor * (ggml_tensor * cur, ggml_tensor * ids, const llama_expert_branch * branch)>;
    // cur: [n_embd, 1 or n_used, n_tokens], ids: [n_used, n_tokens]. Returns the experts' outputs [n_embd, n_used, n_tokens]
    ggml_tensor * build(ggml_context * ctx, ggml_cgraph * gf, ggml_backend_sched_t sched, ggml_tensor * cur,
                        ggml_tensor * ids, const ffn & experts) const;
};

class llama_expert_cache {
public:
    llama_expert_cache(const llama_model & model, const llama_cparams & cparams, const llama_expert_cache_params & params,
                       const std::vector<ggml_backend_t> & backends);
    ~llama_expert_cache();

    // Banks of one slot, so that a graph of both branches can be reserved. false: it is off
    bool prepare();
    // Then those of the size that was asked for. false: it is off
    bool allocate();
    void turn_off(const std::string & why);

    // The layer whose experts' last projection is down, if a graph of n_tokens has both of its branches.
    const llama_expert_layer * layer(const ggml_tensor * down, uint32_t n_tokens, const llama_adapter_loras * loras) const;
    std::vector<uint32_t>      limits() const; // most tokens of such graphs, one for each topology

    // Nothing runs, and a graph of ubatch is next: what the last one used goes to the policy, what was uploaded since is
    // mapped, victims are unmapped and their uploads begin.
    // Other threads may ask for counters and json() meanwhile.
    void idle(ggml_backend_sched_t sched, const llama_ubatch & ubatch, const llama_adapter_loras * loras);

    std::string                 summary() const;
    std::string                 json(bool layers) const;
    llama_expert_cache_counters counters() const;
    std::map<ggml_backend_buffer_type_t, size_t> memory() const;

private:
    struct device;
    struct settings;

    bool add_layer(int32_t il, std::string & why);
    void refuse(int32_t il, const std::string & why);
    void drop(device & d, llama_expert_layer * l, const std::string & why);
    std::string reasons() const;
    int32_t     most_tokens() const;
    llama_expert_cache_counters count() const; // with the mutex held

    bool    alloc_layer(llama_expert_layer & l, device & d, int32_t n_slots);
    bool    alloc_table(device & d);
    bool    alloc_device(device & d, int32_t n_slots);
    void    free_device(device & d);
    int32_t slots_in(const device & d, uint64_t bytes) const;
    void    size_device(device & d);

    void time_step(const llama_ubatch & ubatch, int64_t us);
    void feed(const llama_ubatch & ubatch);
    void collect(device & d, bool & waited);
    void plan(device & d);
    void map(device & d, int32_t i_layer, int32_t expert, int32_t slot);
    void publish(device & d);
    void audit(device & d);

    void log_stats() const;

    mutable std::mutex mutex; // of what counters and json() read

    const llama_model &               model;
    const llama_cparams &             cparams;
    const llama_expert_cache_params   params;
    const std::vector<ggml_backend_t> backends;
    std::unique_ptr<settings>         set;

    bool        active = false;
    std::string reason;   // of being off
    std::string bypass;   // of not being used just now
    std::vector<std::pair<std::string, std::vector<int32_t>>> refused; // reasons, and the layers they are of
    std::vector<std::unique_ptr<llama_expert_layer>> layers;
    std::vector<std::unique_ptr<device>>             devices;
    std::unordered_map<const ggml_tensor *, llama_expert_layer *> by_down;

    struct token {
        int32_t seq, pos;
    };
    std::vector<token> last;              // of the graph that ran last
    bool               last_used = false; // it had both branches
    int64_t            t_last    = 0;     // us, of the last idle point
    double             us_step   = 0;     // smoothed
    int32_t            n_unusual = 0;     // steps in a row
    uint64_t           n_waits = 0, n_steps = 0, n_bypassed = 0;
};
