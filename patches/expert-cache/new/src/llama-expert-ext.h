// SPDX-License-Identifier: MIT
#pragma once

// The expert cache, for programs: all routed experts stay in host memory, those in use are also kept in slots on the
// device of their layer, and the device computes what it holds while the host computes the rest.
//
// Staging API like llama-ext.h: C++, and free to change.

#include "llama.h"

#include <cstdint>
#include <string>

struct llama_expert_cache_params {
    int32_t n_slots = 0;  // of each layer; -1: as many as fit into the free memory of its device, 0: no cache
    int32_t window  = 64; // tokens whose choices count most
};

// To be called when all else that uses device memory is loaded (draft model, projector), and after a warm-up: -1 takes
// what is left. It reserves the context's compute buffers anew. Without effect but for its log line where a cache
// cannot serve; llama_expert_cache_json() says why.
LLAMA_API void llama_expert_cache_init(llama_context * ctx, const llama_expert_cache_params & params);

// A line for each device that has slots, and one for the layers that are not served; empty when it is off.
LLAMA_API std::string llama_expert_cache_summary(const llama_context * ctx);

// {"status": "active" | "off" | "bypassed", "reason": ..., "devices": [...], "layers": [...], counters}
LLAMA_API std::string llama_expert_cache_json(const llama_context * ctx, bool layers = false);

// Whole numbers that only grow, for monitoring; all zero without a cache.
struct llama_expert_cache_counters {
    uint64_t hits     = 0; // pairs of token and expert
    uint64_t misses   = 0;
    uint64_t uploads  = 0;
    uint64_t failed   = 0;
    uint64_t bytes    = 0; // uploaded
    uint64_t waits    = 0; // decodes that waited for uploads
    uint64_t steps    = 0; // decodes that used the cache
    uint64_t bypassed = 0; // decodes of more tokens than the cache serves
};
LLAMA_API llama_expert_cache_counters llama_expert_cache_count(const llama_context * ctx);
