// SPDX-License-Identifier: MIT
#pragma once

#include "llama.h"

#include <string>

struct common_params;

// Makes the expert cache of ctx as params asks for it. After all else that needs device memory.
void common_expert_cache_init(const common_params & params, llama_context * ctx);

// What it says of itself (JSON), for threads that must not touch the context: as of the last update.
void        common_expert_cache_update(const llama_context * ctx, bool now = true); // now: false: if it is some time ago
std::string common_expert_cache_status();

// Its counters as Prometheus reads them.
std::string common_expert_cache_metrics(const llama_context * ctx);
