// SPDX-License-Identifier: MIT
#pragma once

// What the cases of test-expert-cache.cpp stand on: a model on devices and on the CPU, and kinds of residency.

#include "common.h"
#include "ggml-backend.h"
#include "llama-cpp.h"
#include "../src/llama-expert-ext.h"
#include "../src/llama-ext.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

static int n_failed = 0;

static void expect(bool ok, const std::string & what) {
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what.c_str());
        n_failed++;
    }
}

static void set(const char * name, const std::string & value) {
#ifdef _WIN32
    _putenv_s(name, value.c_str());
#else
    if (value.empty()) {
        unsetenv(name);
    } else {
        setenv(name, value.c_str(), 1);
    }
#endif
}

enum { LEAST, HALF, ALL }; // slots: those of a token and one, half of the experts, all

struct mode {
    const char * name;
    int32_t      slots; // LEAST, HALF or ALL
    std::map<std::string, std::string> settings;
};

static const std::vector<std::string> all_settings = { "FAULT_UPLOAD", "FAULT_LIE", "FAULT_ALLOC", "FAULT_ALLOCS", "POLICY", "BUDGET", "WAIT", "AUDIT",
    "DETERMINISTIC", "STICKY", "MARGIN_MB", "MARGIN", "SWAP_FRAC" };

static const std::vector<mode> modes = {
    { "none", HALF,  { { "FAULT_UPLOAD", "1" } } },                                          // no expert ever gets there
    { "swap", LEAST, { { "POLICY", "lru" }, { "BUDGET", "100000" }, { "WAIT", "1" } } },      // other experts in each step
    { "half", HALF,  { { "WAIT", "1" } } },
    { "torn", HALF,  { { "FAULT_UPLOAD", "3" }, { "POLICY", "lru" }, { "BUDGET", "100000" }, { "WAIT", "1" } } },
    { "late", HALF,  { { "POLICY", "lru" }, { "BUDGET", "4" } } },                           // as fast as they come
    { "all",  ALL,   { { "BUDGET", "100000" }, { "WAIT", "1" } } },
};

struct bed {
    common_params     params;
    llama_model_ptr   model, model_ref;
    llama_context_ptr ctx, ctx_ref;
    int32_t           n_vocab = 0, n_expert = 0, n_used = 0;

    explicit bed(const common_params & p) : params(p) {
        llama_model_params mparams = common_model_params_to_llama(params);
        model.reset(llama_model_load_from_file(params.model.path.c_str(), mparams));
        ggml_backend_dev_t none[] = { nullptr };
        mparams.devices               = none;
        mparams.n_gpu_layers          = 0;
        mparams.tensor_buft_overrides = nullptr;
        model_ref.reset(llama_model_load_from_file(params.model.path.c_str(), mparams));
        if (!model || !model_ref) {
            fprintf(stderr, "cannot load %s\n", params.model.path.c_str());
            exit(2);
        }
        n_vocab  = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
        n_expert = llama_model_n_expert(model.get());
        n_used   = meta("expert_used_count");
        ctx     = context(model.get());
        ctx_ref = context(model_ref.get());
    }

    int32_t meta(const std::string & key) const {
        char arch[64], value[64];
        llama_model_meta_val_str(model.get(), "general.architecture", arch, sizeof(arch));
        return llama_model_meta_val_str(model.get(), (std::string(arch) + "." + key).c_str(), value, sizeof(value)) > 0 ? atoi(value) : 0;
    }

    llama_context_ptr context(llama_model * m) {
        llama_context_params cparams = common_context_params_to_llama(params);
        llama_context_ptr c(llama_init_from_model(m, cparams));
        if (!c) {
            fprintf(stderr, "no context\n");
            exit(2);
        }
        return c;
    }

    int32_t slots_of(int32_t which) const {
        return which == ALL ? n_expert : which == HALF ? std::max(n_expert/2, n_used + 1) : n_used + 1;
    }

    void configure(const mode & m, int32_t audit = 64) {
        for (const auto & s : all_settings) {
            set(("LLAMA_MOE_CACHE_" + s).c_str(), "");
        }
        set("LLAMA_MOE_CACHE_MARGIN_MB", "0");
        set("LLAMA_MOE_CACHE_AUDIT", std::to_string(audit));
        for (const auto & [key, value] : m.settings) {
            set(("LLAMA_MOE_CACHE_" + key).c_str(), value);
        }
    }

    void init(const mode & m) {
        configure(m);
        llama_expert_cache_params p;
        p.n_slots = slots_of(m.slots);
        llama_expert_cache_init(ctx.get(), p);
    }

    std::vector<llama_token> tokens(int n, int seed) const {
        std::mt19937 rng(seed);
        std::vector<llama_token> list(n);
        for (auto & t : list) {
            t = (llama_token) (rng() % (uint32_t) n_vocab);
        }
        return list;
    }

    // logits of tokens [from, to), n of them in a batch, at their positions
    std::vector<float> decode(llama_context * c, const std::vector<llama_token> & list, int from, int to, int n, llama_seq_id seq = 0) const {
        std::vector<float> out;
        for (int at = from; at < to; at += n) {
            common_batch batch(c);
            const int end = std::min(at + n, to);
            for (int i = at; i < end; i++) {
                batch.add(list[i], i, seq, true);
            }
            if (llama_process(c, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
                fprintf(stderr, "decode failed\n");
                exit(1);
            }
            for (int i = 0; i < end - at; i++) {
                const float * l = llama_get_logits_ith(c, i);
                out.insert(out.end(), l, l + n_vocab);
            }
        }
        return out;
    }

    static void clear(llama_context * c) {
        llama_memory_clear(llama_get_memory(c), true);
    }
};

// The largest difference; NaN is one.
static double differs(const std::vector<float> & a, const std::vector<float> & b) {
    double most = a.size() == b.size() ? 0.0 : INFINITY;
    for (size_t i = 0; i < a.size() && i < b.size(); i++) {
        const double d = std::fabs((double) a[i] - (double) b[i]);
        most = d <= most ? most : std::isnan(d) ? INFINITY : d;
    }
    return most;
}

static void report(const char * name, const std::string & m, int n, double diff, const llama_context * ctx) {
    printf("{\"case\": \"%s\", \"mode\": \"%s\", \"tokens\": %d, \"max_diff\": %g, \"cache\": %s}\n", name, m.c_str(), n, diff,
        llama_expert_cache_json(ctx, true).c_str());
    fflush(stdout);
    expect(diff == 0.0, std::string(name) + ", " + m + ", " + std::to_string(n) + " tokens: logits differ");
}
