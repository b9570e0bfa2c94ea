// SPDX-License-Identifier: MIT

#include "expert-cache.h"

#include "common.h"
#include "log.h"
#include "../src/llama-expert-ext.h"

#include <mutex>
#include <string>

static constexpr int64_t UPDATE_US = 250*1000;

static std::mutex  status_mutex;
static std::string status_json = "{\"status\": \"off\", \"reason\": \"no model is loaded\"}";

void common_expert_cache_init(const common_params & params, llama_context * ctx) {
    llama_expert_cache_params cache;
    cache.n_slots = params.n_expert_slots;
    cache.window  = params.expert_window;
    llama_expert_cache_init(ctx, cache);
    common_expert_cache_update(ctx);
    for (const std::string & line : string_split(llama_expert_cache_summary(ctx), "\n")) {
        if (!line.empty()) {
            LOG_INF("%s\n", line.c_str());
        }
    }
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

std::string common_expert_cache_metrics(const llama_context * ctx) {
    const llama_expert_cache_counters c = llama_expert_cache_count(ctx);
    struct { const char * name; const char * description; uint64_t value; } const all[] = {
        { "hits",           "experts of a token that were in a slot",       c.hits },
        { "misses",         "experts of a token that the host computed",    c.misses },
        { "uploads",        "experts that were copied to a device",         c.uploads },
        { "uploads_failed", "copies that failed",                           c.failed },
        { "upload_bytes",   "bytes that were copied to devices",            c.bytes },
        { "waits",          "decodes that waited for copies",               c.waits },
        { "steps",          "decodes that used it",                         c.steps },
        { "bypassed_steps", "decodes that did not, of more tokens or none", c.bypassed },
    };
    std::string text;
    for (const auto & m : all) {
        const std::string name = std::string("llamacpp:moe_cache_") + m.name + "_total";
        text += "# HELP " + name + " Expert cache: " + m.description + "\n# TYPE " + name + " counter\n" +
                name + " " + std::to_string(m.value) + "\n";
    }
    return text;
}
