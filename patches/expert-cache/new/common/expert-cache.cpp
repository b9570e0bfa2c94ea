// SPDX-License-Identifier: MIT

#include "expert-cache.h"

#include "common.h"
#include "../src/llama-expert-ext.h"

#include <mutex>

static constexpr int64_t UPDATE_US = 250*1000;

static std::mutex  status_mutex;
static std::string status_json = "{\"status\": \"off\", \"reason\": \"no model is loaded\"}";

void common_expert_cache_init(const common_params & params, llama_context * ctx) {
    llama_expert_cache_params cache;
    cache.n_slots = params.n_expert_slots;
    cache.window  = params.expert_window;
    llama_expert_cache_init(ctx, cache);
    common_expert_cache_update(ctx);
}

void common_expert_cache_update(const llama_context * ctx, bool now) {
    static int64_t t_last = 0; // of the one thread that updates
    if (!now && ggml_time_us() - t_last < UPDATE_US) {
        return;
    }
    t_last = ggml_time_us();
    std::string json = ctx ? llama_expert_cache_json(ctx) : "{\"status\": \"off\", \"reason\": \"the model is not loaded\"}";
    std::lock_guard<std::mutex> lock(status_mutex);
    status_json = std::move(json);
}

std::string common_expert_cache_status() {
    std::lock_guard<std::mutex> lock(status_mutex);
    return status_json;
}

std::vector<common_expert_cache_metric> common_expert_cache_metrics(const llama_context * ctx) {
    const llama_expert_cache_counters c = llama_expert_cache_count(ctx);
    return {
        { "moe_cache_hits_total",           "Expert cache: experts of a token that were in a slot",       (double) c.hits },
        { "moe_cache_misses_total",         "Expert cache: experts of a token that the host computed",    (double) c.misses },
        { "moe_cache_uploads_total",        "Expert cache: experts that were copied to a device",         (double) c.uploads },
        { "moe_cache_uploads_failed_total", "Expert cache: copies that failed",                           (double) c.failed },
        { "moe_cache_upload_bytes_total",   "Expert cache: bytes that were copied to devices",            (double) c.bytes },
        { "moe_cache_waits_total",          "Expert cache: decodes that waited for copies",               (double) c.waits },
        { "moe_cache_steps_total",          "Expert cache: decodes that used it",                         (double) c.steps },
        { "moe_cache_bypassed_steps_total", "Expert cache: decodes that did not, of more tokens or none", (double) c.bypassed },
    };
}
