// SPDX-License-Identifier: MIT
#pragma once

// Inside of the cache, for its own files.

#include "llama-expert-cache.h"

#include "ggml-skip-ids.h"

// LLAMA_MOE_CACHE_*
struct llama_expert_cache::settings {
    size_t  margin        = 384u << 20; // bytes of each device that stay free
    bool    stats         = false;      // a table per layer at the end
    bool    wait          = false;      // each decode waits for the uploads of the one before
    int32_t audit         = 0;          // slots of each device that are compared with their source at each idle point
    int32_t limit         = 31;         // tokens
    int32_t fault_upload  = 0;          // tests: each such upload fails ...
    bool    fault_lie     = false;      // ... and says that it did not
    int32_t fault_alloc   = -1;         // tests: allocations of banks from this one on fail ...
    int32_t fault_allocs  = 1;          // ... so many times
    int32_t n_allocs      = 0;

    llama_expert_policy_params policy;

    std::string read(); // the reason why it cannot be used, or nothing
};

struct llama_expert_cache::device {
    ggml_backend_dev_t dev     = nullptr;
    ggml_backend_t     backend = nullptr; // that of the context
    int32_t            n_slots = 0;       // of a layer, at most
    size_t             free    = 0;       // bytes, before its banks were made

    std::vector<llama_expert_layer *> layers;
    llama_expert_layer *              failed_at = nullptr;

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           table = nullptr; // [1, experts of all its layers]
    std::vector<int32_t>    values;          // of the table; the device may read them until the next idle point
    bool                    dirty = false;

    std::unique_ptr<llama_expert_policy>   policy;
    std::unique_ptr<llama_expert_uploader> up;

    std::unordered_map<int64_t, llama_expert_policy::swap> in_flight; // by the job's id
    int64_t  next_id = 0;
    uint64_t n_uploads = 0, n_failed = 0, n_bytes = 0;
    int64_t  us_uploads = 0;
    size_t   audit_at = 0; // slot, over all layers
};
