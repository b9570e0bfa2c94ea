// SPDX-License-Identifier: MIT

// Records which experts each token uses in each MoE layer: of a prompt, then of what the model says next.
//
//   llama-expert-trace -m MODEL (-p TEXT | -f FILE) -n TOKENS -o TRACE [options of llama-completion]
//
// The format is described in llamafork/trace/format.py. The ids are read by the evaluation callback, so the model runs
// node by node: this is slow, and says nothing about speed.

#include "arg.h"
#include "common.h"
#include "sampling.h"

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <atomic>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

enum trace_phase : uint8_t { TRACE_PROMPT = 0, TRACE_DECODE = 1 };

static std::atomic<bool> g_stop{false};

static void on_signal(int) {
    g_stop = true;
}

struct trace_recorder {
    std::map<int, std::vector<int32_t>> ids; // by layer: the ids of the tokens of the current batch, in order
    int n_used = 0;

    // [n_used, n_tokens], a view with the stride of all experts
    void add(int layer, const ggml_tensor * t) {
        n_used = (int) t->ne[0];
        auto & out = ids[layer];
        for (int64_t i = 0; i < t->ne[1]; i++) {
            const size_t at = out.size();
            out.resize(at + t->ne[0]);
            ggml_backend_tensor_get(t, out.data() + at, i*t->nb[1], t->ne[0]*sizeof(int32_t));
        }
    }
};

static bool trace_callback(ggml_tensor * t, bool ask, void * data) {
    static const char prefix[] = "ffn_moe_topk-";
    if (strncmp(t->name, prefix, sizeof(prefix) - 1) != 0) {
        return !ask;
    }
    if (!ask) {
        ((trace_recorder *) data)->add(atoi(t->name + sizeof(prefix) - 1), t);
    }
    return true;
}

struct trace_writer {
    FILE      * file   = nullptr;
    std::string name;
    int         width  = 1;
    size_t      tokens = 0;

    bool open(const std::string & path) {
        name = path;
        file = fopen((path + ".part").c_str(), "wb");
        return file != nullptr;
    }

    void header(const trace_recorder & rec, int n_expert, const std::string & model) {
        width = n_expert <= 256 ? 1 : 2;
        std::string layers;
        for (const auto & l : rec.ids) {
            layers += (layers.empty() ? "" : ", ") + std::to_string(l.first);
        }
        std::string quoted;
        for (const char c : model) {
            quoted += c == '"' || c == '\\' || (unsigned char) c < 0x20 ? '_' : c;
        }
        const std::string text = "{\"layers\": [" + layers + "], \"n_expert\": " + std::to_string(n_expert) +
            ", \"n_used\": " + std::to_string(rec.n_used) + ", \"width\": " + std::to_string(width) +
            ", \"model\": \"" + quoted + "\"}";
        const uint32_t size = (uint32_t) text.size();
        const uint8_t length[] = { (uint8_t) size, (uint8_t) (size >> 8), (uint8_t) (size >> 16), (uint8_t) (size >> 24) };
        fwrite("LFTRACE1", 1, 8, file);
        fwrite(length, 1, 4, file);
        fwrite(text.data(), 1, text.size(), file);
    }

    // false if the layers of this batch do not have the same tokens
    bool batch(const trace_recorder & rec, const llama_token * token, size_t n, trace_phase phase) {
        for (const auto & l : rec.ids) {
            if (l.second.size() != n*rec.n_used) {
                return false;
            }
        }
        std::vector<uint8_t> row;
        for (size_t i = 0; i < n; i++) {
            row.clear();
            const uint32_t id = (uint32_t) token[i];
            for (int shift = 0; shift < 32; shift += 8) {
                row.push_back((uint8_t) (id >> shift));
            }
            row.push_back(phase);
            for (const auto & l : rec.ids) {
                for (int k = 0; k < rec.n_used; k++) {
                    const int32_t expert = l.second[i*rec.n_used + k];
                    row.push_back((uint8_t) expert);
                    if (width == 2) {
                        row.push_back((uint8_t) (expert >> 8));
                    }
                }
            }
            fwrite(row.data(), 1, row.size(), file);
        }
        tokens += n;
        return true;
    }

    // the file gets its name only when it is whole
    bool close() {
        const bool ok = ferror(file) == 0;
        return fclose(file) == 0 && ok && rename((name + ".part").c_str(), name.c_str()) == 0;
    }
};

static int n_expert_of(const llama_model * model) {
    char arch[128] = "";
    char value[32] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));
    const std::string key = std::string(arch) + ".expert_count";
    return llama_model_meta_val_str(model, key.c_str(), value, sizeof(value)) > 0 ? atoi(value) : 0;
}

// takes "-o FILE" out of the arguments
static std::string take_output(int & argc, char ** argv) {
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "-o") == 0) {
            const std::string path = argv[i + 1];
            std::copy(argv + i + 2, argv + argc + 1, argv + i);
            argc -= 2;
            return path;
        }
    }
    return "";
}

int main(int argc, char ** argv) {
    std::setlocale(LC_NUMERIC, "C");
    common_init();
    const std::string out = take_output(argc, argv);

    common_params params;
    trace_recorder rec;
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_COMPLETION)) {
        return 1;
    }
    if (out.empty() || params.prompt.empty()) {
        fprintf(stderr, "usage: %s -m MODEL (-p TEXT | -f FILE) -n TOKENS -o TRACE\n", argv[0]);
        return 1;
    }
    params.cb_eval           = trace_callback;
    params.cb_eval_user_data = &rec;
    params.warmup            = false;
    params.n_batch           = std::min(params.n_batch, 64); // each token is an output, so that the last layer has them all

    llama_backend_init();
    llama_numa_init(params.numa);
    common_init_result_ptr init = common_init_from_params(params);
    llama_model   * model = init->model();
    llama_context * ctx   = init->context();
    if (!model || !ctx) {
        fprintf(stderr, "cannot load the model\n");
        return 1;
    }
    const int n_expert = n_expert_of(model);
    if (n_expert <= 0) {
        fprintf(stderr, "%s has no experts\n", params.model.path.c_str());
        return 1;
    }

    std::vector<llama_token> tokens = common_tokenize(ctx, params.prompt, true);
    const int n_ctx     = (int) llama_n_ctx(ctx);
    const int n_predict = params.n_predict < 0 ? n_ctx - (int) tokens.size() : params.n_predict;
    if (tokens.empty() || (int) tokens.size() + n_predict > n_ctx) {
        fprintf(stderr, "the prompt (%zu tokens) and %d more do not fit the context of %d: use -c\n", tokens.size(), n_predict, n_ctx);
        return 1;
    }

    trace_writer writer;
    if (!writer.open(out)) {
        fprintf(stderr, "cannot write %s.part\n", out.c_str());
        return 1;
    }
    std::signal(SIGINT,  on_signal);
    std::signal(SIGTERM, on_signal);

    int  n_past = 0;
    bool ok     = true;
    const auto process = [&](const llama_token * data, int n, trace_phase phase) {
        rec.ids.clear();
        common_batch batch(ctx);
        for (int i = 0; i < n; i++) {
            batch.add(data[i], n_past + i, 0, true);
        }
        if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            fprintf(stderr, "decoding failed at token %d\n", n_past);
            return false;
        }
        llama_synchronize(ctx);
        n_past += n;
        if (rec.ids.empty()) {
            fprintf(stderr, "no layer chose experts: this build does not name them as expected\n");
            return false;
        }
        if (writer.tokens == 0) {
            writer.header(rec, n_expert, params.model.path.substr(params.model.path.find_last_of('/') + 1));
        }
        if (!writer.batch(rec, data, n, phase)) {
            fprintf(stderr, "the layers of one batch differ in their tokens\n");
            return false;
        }
        return true;
    };

    for (size_t at = 0; ok && !g_stop && at < tokens.size(); at += params.n_batch) {
        ok = process(tokens.data() + at, (int) std::min<size_t>(params.n_batch, tokens.size() - at), TRACE_PROMPT);
    }

    common_sampler * sampler = common_sampler_init(model, params.sampling);
    for (int i = 0; ok && !g_stop && i < n_predict; i++) {
        const llama_token id = common_sampler_sample(sampler, ctx, -1);
        common_sampler_accept(sampler, id, true);
        if (llama_vocab_is_eog(llama_model_get_vocab(model), id) && !params.sampling.ignore_eos) {
            break;
        }
        ok = process(&id, 1, TRACE_DECODE);
    }
    common_sampler_free(sampler);

    if (!ok || writer.tokens == 0) {
        fclose(writer.file);
        remove((out + ".part").c_str());
        return 1;
    }
    if (!writer.close()) {
        fprintf(stderr, "cannot write %s\n", out.c_str());
        return 1;
    }
    fprintf(stderr, "%zu tokens recorded in %s%s\n", writer.tokens, out.c_str(), g_stop ? " (stopped early)" : "");
    return g_stop ? 130 : 0;
}
