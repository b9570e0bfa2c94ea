// SPDX-License-Identifier: MIT
#pragma once

struct ggml_cgraph;

// Moves what a layer computes beside its routed experts, that is its shared expert, into the device's branch, so that it
// is computed while the host computes the misses; models add it behind the sum of both. Only the order of nodes changes.
// Returns how many were moved. LLAMA_MOE_CACHE_SHARED=0: none.
int llama_expert_order(ggml_cgraph * gf);
