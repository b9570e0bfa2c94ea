// SPDX-License-Identifier: MIT
#pragma once

// What the cases of test-expert-cache.cpp stand on: a model on devices and on the CPU, and kinds of residency.

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

// Those of llama.cpp's options that matter here. Not its parser: with it this program would need most of common.
struct options {
    std::string        model;
    std::string        rpc;
    std::vector<float> split;
    int32_t n_gpu_layers = 0, n_cpu_moe = 0, n_threads = 1, n_seq = 4, n_slots = 0, window = 64, seed = 1;
    int32_t n_ctx = 1024, n_batch = 512, n_ubatch = 512;
    bool    repack       = true;

    ggml_backend_sched_eval_callback cb_eval = nullptr;

    bool parse(int argc, char ** argv) {
        const std::map<std::string, int32_t *> numbers = {
            { "-ngl", &n_gpu_layers }, { "-ncmoe", &n_cpu_moe }, { "-t", &n_threads }, { "-np", &n_seq }, { "--seed", &seed },
            { "--moe-expert-cache", &n_slots }, { "--moe-cache-window", &window },
            { "-c", &n_ctx }, { "-b", &n_batch }, { "-ub", &n_ubatch },
        };
        for (int i = 0; i < argc; i++) {
            const std::string name = argv[i];
            if (name == "-cmoe" || name == "-nr") {
                (name == "-cmoe" ? n_cpu_moe = 1000 : repack = false);
                continue;
            }
            if (i + 1 == argc) {
                return false;
            }
            const std::string value = argv[++i];
            const auto found = numbers.find(name);
            if (found != numbers.end()) {
                *found->second = std::stoi(value);
            } else if (name == "-m") {
                model = value;
            } else if (name == "--rpc") {
                rpc = value;
            } else if (name == "-ts") {
                for (size_t at = 0; at < value.size(); at = std::min(value.find(',', at), value.size() - 1) + 1) {
                    split.push_back(std::stof(value.substr(at)));
                }
            } else {
                return false;
            }
        }
        return !model.empty();
    }
};

static void add_remote_devices(const std::string & servers) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
    const auto add = (ggml_backend_reg_t (*)(const char *)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_rpc_add_server");
    for (size_t at = 0; at < servers.size();) {
        const size_t end = std::min(servers.find(',', at), servers.size());
        ggml_backend_register(add(servers.substr(at, end - at).c_str()));
        at = end + 1;
    }
}

struct bed {
    options           params;
    llama_model_ptr   model, model_ref;
    llama_context_ptr ctx, ctx_ref;
    int32_t           n_vocab = 0, n_expert = 0, n_used = 0;

    explicit bed(const options & p) : params(p) {
        llama_model_params mparams = llama_model_default_params();
        mparams.n_gpu_layers    = params.n_gpu_layers;
        mparams.use_extra_bufts = params.repack;
        params.split.resize(llama_max_devices());
        mparams.tensor_split = params.split[0] > 0 ? params.split.data() : nullptr;
        std::vector<std::string> patterns;
        for (int32_t i = 0; i < params.n_cpu_moe; i++) {
            const std::string layer = params.n_cpu_moe == 1000 ? "" : "blk\\." + std::to_string(i);
            patterns.push_back(layer + "\\.ffn_(up|down|gate|gate_up)_(ch|)exps");
            if (layer.empty()) {
                break;
            }
        }
        std::vector<llama_model_tensor_buft_override> overrides;
        for (const std::string & pattern : patterns) {
            overrides.push_back({ pattern.c_str(), ggml_backend_cpu_buffer_type() });
        }
        overrides.push_back({ nullptr, nullptr });
        mparams.tensor_buft_overrides = overrides.data();
        model.reset(llama_model_load_from_file(params.model.c_str(), mparams));
        ggml_backend_dev_t none[] = { nullptr };
        mparams.devices               = none;
        mparams.n_gpu_layers          = 0;
        mparams.tensor_buft_overrides = nullptr;
        mparams.tensor_split          = nullptr;
        model_ref.reset(llama_model_load_from_file(params.model.c_str(), mparams));
        if (!model || !model_ref) {
            fprintf(stderr, "cannot load %s\n", params.model.c_str());
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
        llama_context_params cparams = llama_context_default_params();
        cparams.n_ctx           = params.n_ctx;
        cparams.n_batch         = params.n_batch;
        cparams.n_ubatch        = params.n_ubatch;
        cparams.n_seq_max       = params.n_seq;
        cparams.n_threads       = params.n_threads;
        cparams.n_threads_batch = params.n_threads;
        cparams.kv_unified      = true;
        cparams.cb_eval         = params.cb_eval;
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

    struct entry {
        llama_token  token;
        llama_pos    pos;
        llama_seq_id seq;
    };

    // a batch, all of it with logits
    static int decode(llama_context * c, const std::vector<entry> & entries) {
        llama_batch batch = llama_batch_init((int32_t) entries.size(), 0, 1);
        for (const entry & e : entries) {
            const int32_t i = batch.n_tokens++;
            batch.token   [i]    = e.token;
            batch.pos     [i]    = e.pos;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = e.seq;
            batch.logits  [i]    = 1;
        }
        const int code = llama_decode(c, batch);
        llama_batch_free(batch);
        return code;
    }

    // logits of tokens [from, to), n of them in a batch, at their positions
    std::vector<float> decode(llama_context * c, const std::vector<llama_token> & list, int from, int to, int n, llama_seq_id seq = 0) const {
        std::vector<float> out;
        for (int at = from; at < to; at += n) {
            const int end = std::min(at + n, to);
            std::vector<entry> entries;
            for (int i = at; i < end; i++) {
                entries.push_back({ list[i], i, seq });
            }
            if (decode(c, entries) != 0) {
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
