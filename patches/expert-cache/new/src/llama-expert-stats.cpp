// SPDX-License-Identifier: MIT

// Settings, and what the cache says of itself.

#include "llama-expert-cache-impl.h"

#include "llama-impl.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdlib>
#include <cstring>

static constexpr double MIB = 1024.0*1024.0;

//
// settings
//

// Reads NAME into value, if it is set; false: it is no number from lo to hi.
static bool number(const char * name, double lo, double hi, double & value) {
    const char * text = std::getenv(name);
    if (!text || !*text) {
        return true;
    }
    char * end = nullptr;
    const double v = std::strtod(text, &end);
    if (*end || !std::isfinite(v) || v < lo || v > hi) {
        return false;
    }
    value = v;
    return true;
}

template <typename T> static bool number(const char * name, double lo, double hi, T & value) {
    double v = (double) value;
    if (!number(name, lo, hi, v)) {
        return false;
    }
    value = (T) v;
    return std::is_floating_point<T>::value || v == std::floor(v);
}

std::string llama_expert_cache::settings::read() {
    int64_t mib = (int64_t) (margin >> 20);
    int32_t min_batch = 32;
    struct { const char * name; bool ok; } const all[] = {
        { "LLAMA_MOE_CACHE_MARGIN_MB",     number("LLAMA_MOE_CACHE_MARGIN_MB",     0, 1 << 20, mib) },
        { "LLAMA_MOE_CACHE_STATS",         number("LLAMA_MOE_CACHE_STATS",         0, 1,       stats) },
        { "LLAMA_MOE_CACHE_WAIT",          number("LLAMA_MOE_CACHE_WAIT",          0, 1,       wait) },
        { "LLAMA_MOE_CACHE_AUDIT",         number("LLAMA_MOE_CACHE_AUDIT",         0, 1 << 20, audit) },
        { "LLAMA_MOE_CACHE_BUDGET",        number("LLAMA_MOE_CACHE_BUDGET",        0, 1 << 20, policy.budget) },
        { "LLAMA_MOE_CACHE_MARGIN",        number("LLAMA_MOE_CACHE_MARGIN",        0, 1e6,     policy.margin) },
        { "LLAMA_MOE_CACHE_SWAP_FRAC",     number("LLAMA_MOE_CACHE_SWAP_FRAC",     0, 1,       policy.swap_frac) },
        { "LLAMA_MOE_CACHE_STICKY",        number("LLAMA_MOE_CACHE_STICKY",        0, 1,       policy.sticky) },
        { "LLAMA_MOE_CACHE_DETERMINISTIC", number("LLAMA_MOE_CACHE_DETERMINISTIC", 0, 1,       policy.deterministic) },
        { "LLAMA_MOE_CACHE_FAULT_UPLOAD",  number("LLAMA_MOE_CACHE_FAULT_UPLOAD",  0, 1 << 30, fault_upload) },
        { "LLAMA_MOE_CACHE_FAULT_LIE",     number("LLAMA_MOE_CACHE_FAULT_LIE",     0, 1,       fault_lie) },
        { "LLAMA_MOE_CACHE_FAULT_ALLOC",   number("LLAMA_MOE_CACHE_FAULT_ALLOC",  -1, 1 << 30, fault_alloc) },
        { "LLAMA_MOE_CACHE_FAULT_ALLOCS",  number("LLAMA_MOE_CACHE_FAULT_ALLOCS",  0, 1 << 30, fault_allocs) },
        { "GGML_OP_OFFLOAD_MIN_BATCH",     number("GGML_OP_OFFLOAD_MIN_BATCH",     0, 1 << 30, min_batch) },
    };
    for (const auto & s : all) {
        if (!s.ok) {
            return format("%s=%s is not a number it takes", s.name, std::getenv(s.name));
        }
    }
    const char * kind = std::getenv("LLAMA_MOE_CACHE_POLICY");
    if (kind && !strcmp(kind, "lru")) {
        policy.type = llama_expert_policy_params::LRU;
    } else if (kind && *kind && strcmp(kind, "score") != 0) {
        return format("LLAMA_MOE_CACHE_POLICY=%s is neither score nor lru", kind);
    }
    margin = (size_t) mib << 20;
    limit  = std::min(31, min_batch - 1); // larger ones go to the device as a whole, also those of misses
    wait   = wait || policy.deterministic;
    return "";
}

//
// statistics
//

static std::string ranges(std::vector<int32_t> list) {
    std::sort(list.begin(), list.end());
    std::string s;
    for (size_t i = 0; i < list.size();) {
        size_t j = i;
        while (j + 1 < list.size() && list[j + 1] == list[j] + 1) {
            j++;
        }
        s += (s.empty() ? "" : ", ") + std::to_string(list[i]) + (j > i ? "-" + std::to_string(list[j]) : "");
        i = j + 1;
    }
    return s;
}

std::string llama_expert_cache::reasons() const {
    std::string s;
    for (const auto & r : refused) {
        s += (s.empty() ? "" : "; ") + std::string(r.second.size() > 1 ? "layers " : "layer ") + ranges(r.second) + ": " + r.first;
    }
    return s;
}

llama_expert_cache_counters llama_expert_cache::counters() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return count();
}

llama_expert_cache_counters llama_expert_cache::count() const {
    llama_expert_cache_counters c;
    for (const auto & l : layers) {
        c.hits   += l->hits;
        c.misses += l->misses;
    }
    for (const auto & d : devices) {
        c.uploads += d->n_uploads;
        c.failed  += d->n_failed;
        c.bytes   += d->n_bytes;
    }
    c.waits    = n_waits;
    c.steps    = n_steps;
    c.bypassed = n_bypassed;
    return c;
}

static double share(uint64_t part, uint64_t rest) {
    return part + rest > 0 ? (double) part/(double) (part + rest) : 0.0;
}

static std::string quoted(const std::string & text) {
    std::string s = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            s += '\\';
        }
        s += (unsigned char) c < 0x20 ? ' ' : c;
    }
    return s + "\"";
}

std::string llama_expert_cache::json(bool with_layers) const {
    const std::lock_guard<std::mutex> lock(mutex);
    const llama_expert_cache_counters c = count();
    std::string s = format("{\"status\": \"%s\", \"reason\": %s", !active ? "off" : bypass.empty() ? "active" : "bypassed",
        quoted(!active ? reason : bypass).c_str());
    s += format(", \"window\": %d, \"not_served\": %s, \"max_tokens\": %d", set->policy.window, quoted(active ? reasons() : "").c_str(), most_tokens());
    s += format(", \"hits\": %" PRIu64 ", \"misses\": %" PRIu64 ", \"hit_rate\": %.4f, \"uploads\": %" PRIu64 ", \"uploads_failed\": %" PRIu64
        ", \"upload_bytes\": %" PRIu64 ", \"waits\": %" PRIu64 ", \"steps\": %" PRIu64 ", \"bypassed_steps\": %" PRIu64 ", \"devices\": [",
        c.hits, c.misses, share(c.hits, c.misses), c.uploads, c.failed, c.bytes, c.waits, c.steps, c.bypassed);
    for (size_t i = 0; i < devices.size(); i++) {
        const device & d = *devices[i];
        uint64_t bytes = 0;
        std::vector<int32_t> list;
        for (const llama_expert_layer * l : d.layers) {
            bytes += ggml_backend_buffer_get_size(l->buf.get());
            list.push_back(l->il);
        }
        s += format("%s{\"name\": %s, \"layers\": %s, \"slots\": %d, \"bytes\": %" PRIu64 ", \"margin_bytes\": %zu, \"skips\": %s"
            ", \"uploads\": %" PRIu64 ", \"upload_us\": %" PRId64 "}", i ? ", " : "", quoted(ggml_backend_dev_name(d.dev)).c_str(),
            quoted(ranges(list)).c_str(), d.n_slots, bytes, set->margin, d.layers.front()->skip ? "true" : "false", d.n_uploads, d.us_uploads);
    }
    s += "]";
    if (with_layers) {
        s += ", \"layers\": [";
        for (size_t i = 0; i < layers.size(); i++) {
            const llama_expert_layer & l = *layers[i];
            s += format("%s{\"layer\": %d, \"slots\": %d, \"experts\": %d, \"hits\": %" PRIu64 ", \"misses\": %" PRIu64 "}", i ? ", " : "",
                l.il, l.n_slots, l.n_expert, l.hits.load(), l.misses.load());
        }
        s += "]";
    }
    return s + "}";
}

int32_t llama_expert_cache::most_tokens() const {
    int32_t most = 0;
    for (const auto & l : layers) {
        most = std::max(most, l->limit);
    }
    return most;
}

std::string llama_expert_cache::summary() const {
    std::string text;
    for (const auto & d : devices) {
        uint64_t bytes = 0, slots = 0, experts = 0;
        int32_t limit = 0, zeros = 0;
        std::vector<int32_t> list;
        for (const llama_expert_layer * l : d->layers) {
            limit    = std::max(limit, l->limit);
            zeros   += !l->skip;
            bytes   += ggml_backend_buffer_get_size(l->buf.get());
            slots   += l->n_slots;
            experts += l->n_expert;
            list.push_back(l->il);
        }
        text += format("expert cache: %s: %d slots in each of %zu layers (%s), %.1f %% of their experts, %.1f MiB of %.1f MiB free, margin %.0f MiB, "
            "up to %d tokens%s\n", ggml_backend_dev_name(d->dev), d->n_slots, d->layers.size(), ranges(list).c_str(), 100.0*slots/experts,
            bytes/MIB, d->free/MIB, set->margin/MIB, limit, zeros ? ", misses read a slot of zeros" : "");
    }
    if (active && !refused.empty()) {
        text += "expert cache: not served: " + reasons() + "\n";
    }
    return text;
}

void llama_expert_cache::log_stats() const {
    const llama_expert_cache_counters c = count();
    LLAMA_LOG_WARN("expert cache: %.1f %% hits, %" PRIu64 " uploads (%.1f hits each, %.1f MiB), %" PRIu64 " failed, %" PRIu64 " waits, "
        "%" PRIu64 " decodes with it, %" PRIu64 " without\n", 100*share(c.hits, c.misses), c.uploads, c.uploads ? (double) c.hits/c.uploads : 0.0,
        c.bytes/MIB, c.failed, c.waits, c.steps, c.bypassed);
    for (const auto & l : layers) {
        LLAMA_LOG_WARN("expert cache: layer %3d: %4d of %4d experts, %5.1f %% hits of %" PRIu64 "\n", l->il, l->n_slots, l->n_expert,
            100*share(l->hits, l->misses), l->hits + l->misses);
    }
}
