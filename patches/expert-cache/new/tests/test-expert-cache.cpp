// SPDX-License-Identifier: MIT

// The expert cache against the CPU alone, by value: test-expert-cache CASE [llama.cpp's options, among them -m]. A line
// of JSON for each run. Both sides have to compute with the same kernels: simulated or remote devices, -nr, -t 1.

#include "arg.h"
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

static void case_logits(bed & b, int seed) {
    for (const int n : { 1, 2, 7, 8, 9, 16, 31, 32, 33, 64 }) {
        const int n_all = n == 1 ? 40 : std::max(3*n, 48/n*n);
        const auto list = b.tokens(n_all, seed + n);
        b.clear(b.ctx_ref.get());
        const auto want = b.decode(b.ctx_ref.get(), list, 0, n_all, n);
        for (const mode & m : modes) {
            b.init(m);
            b.clear(b.ctx.get());
            report("logits", m.name, n, differs(want, b.decode(b.ctx.get(), list, 0, n_all, n)), b.ctx.get());
        }
    }
}

// batches of all sizes in turns, and the compute buffers stay as they are
static void case_mixed(bed & b, int seed) {
    const std::vector<int> sizes = { 64, 1, 1, 33, 3, 1, 31, 1, 32, 2, 5, 1, 64, 1, 8, 1 };
    int n_all = 0;
    for (const int n : sizes) {
        n_all += n;
    }
    const auto list = b.tokens(n_all, seed);
    const auto run = [&](llama_context * c) {
        std::vector<float> out;
        int at = 0;
        for (const int n : sizes) {
            const auto part = b.decode(c, list, at, at + n, n);
            out.insert(out.end(), part.begin(), part.end());
            at += n;
        }
        return out;
    };
    b.clear(b.ctx_ref.get());
    const auto want = run(b.ctx_ref.get());
    const auto compute = [&] {
        std::map<ggml_backend_buffer_type_t, size_t> sizes;
        for (const auto & [buft, data] : llama_get_memory_breakdown(b.ctx.get())) {
            sizes[buft] = data.compute;
        }
        return sizes;
    };
    for (const mode & m : modes) {
        b.init(m);
        b.clear(b.ctx.get());
        const auto before = compute();
        report("mixed", m.name, 0, differs(want, run(b.ctx.get())), b.ctx.get());
        expect(before == compute(), std::string("the compute buffers have grown, ") + m.name);
    }
}

// some sequences at once, one decode for all
static void case_sequences(bed & b, int seed) {
    const int n_seq = std::min<int>(4, llama_n_seq_max(b.ctx.get())), n_each = 24;
    expect(n_seq > 1, "-np 4");
    std::vector<std::vector<llama_token>> lists;
    for (int s = 0; s < n_seq; s++) {
        lists.push_back(b.tokens(n_each, seed + s));
    }
    const auto run = [&](llama_context * c) {
        std::vector<float> out;
        for (int i = 0; i < n_each; i++) {
            common_batch batch(c);
            for (int s = 0; s < n_seq; s++) {
                batch.add(lists[s][i], i, s, true);
            }
            if (llama_process(c, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
                exit(1);
            }
            for (int s = 0; s < n_seq; s++) {
                const float * l = llama_get_logits_ith(c, s);
                out.insert(out.end(), l, l + b.n_vocab);
            }
        }
        return out;
    };
    b.clear(b.ctx_ref.get());
    const auto want = run(b.ctx_ref.get());
    for (const mode & m : modes) {
        b.init(m);
        b.clear(b.ctx.get());
        report("sequences", m.name, n_seq, differs(want, run(b.ctx.get())), b.ctx.get());
    }
}

// the state of one context goes on in the other
static void case_state(bed & b, int seed) {
    const auto list = b.tokens(40, seed);
    b.clear(b.ctx_ref.get());
    auto want = b.decode(b.ctx_ref.get(), list, 0, 40, 1);
    want.erase(want.begin(), want.begin() + (size_t) 20*b.n_vocab);
    for (const mode & m : modes) {
        b.init(m);
        b.clear(b.ctx.get());
        b.decode(b.ctx.get(), list, 0, 20, 1);
        std::vector<uint8_t> state(llama_state_get_size(b.ctx.get()));
        expect(llama_state_get_data(b.ctx.get(), state.data(), state.size()) == state.size(), "state is written");
        b.clear(b.ctx.get());
        expect(llama_state_set_data(b.ctx.get(), state.data(), state.size()) == state.size(), "state is read");
        report("state", m.name, 1, differs(want, b.decode(b.ctx.get(), list, 20, 40, 1)), b.ctx.get());
    }
}

// generation is aborted in the middle of a graph, then goes on
static void case_abort(bed & b, int seed) {
    const auto list = b.tokens(40, seed);
    b.clear(b.ctx_ref.get());
    auto want = b.decode(b.ctx_ref.get(), list, 0, 40, 1);
    want.erase(want.begin(), want.begin() + (size_t) 20*b.n_vocab);
    for (const mode & m : modes) {
        b.init(m);
        b.clear(b.ctx.get());
        b.decode(b.ctx.get(), list, 0, 20, 1);
        static int calls_left;
        int aborted = 0;
        for (const int calls : { 0, 1, 3, 7, 20, 60 }) {
            calls_left = calls;
            llama_set_abort_callback(b.ctx.get(), [](void *) { return calls_left-- <= 0; }, nullptr);
            common_batch batch(b.ctx.get());
            batch.add(list[20], 20, 0, true);
            const int code = llama_process(b.ctx.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get());
            aborted += code == 2;
            llama_set_abort_callback(b.ctx.get(), nullptr, nullptr);
            if (code == 0 && !llama_memory_seq_rm(llama_get_memory(b.ctx.get()), 0, 20, -1)) {
                fprintf(stderr, "this memory forgets no single token\n");
                exit(2);
            }
        }
        expect(aborted > 0, "something was aborted");
        report("abort", m.name, 1, differs(want, b.decode(b.ctx.get(), list, 20, 40, 1)), b.ctx.get());
    }
}

static std::map<std::string, size_t> free_memory() {
    std::map<std::string, size_t> list;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
            size_t free, total;
            ggml_backend_dev_memory(dev, &free, &total);
            list[ggml_backend_dev_name(dev)] = free;
        }
    }
    return list;
}

// contexts come and go, with a second one beside them or not, and nothing stays behind
static void case_cycles(bed & b, int seed) {
    const auto list = b.tokens(8, seed);
    b.clear(b.ctx_ref.get());
    const auto want = b.decode(b.ctx_ref.get(), list, 0, 8, 1);
    b.ctx.reset();
    const auto before = free_memory();
    for (int i = 0; i < 200; i++) {
        const mode & m = modes[i % modes.size()];
        b.ctx = b.context(b.model.get());
        b.init(m);
        llama_context_ptr draft;
        if (i % 2) {
            draft = b.context(b.model.get());
        }
        const double diff = differs(want, b.decode(b.ctx.get(), list, 0, 8, 1));
        if (draft) {
            b.decode(draft.get(), list, 0, 4, 1);
            expect(llama_expert_cache_json(draft.get()).find("\"off\"") != std::string::npos, "the second context has no cache");
            draft.reset();
            b.clear(b.ctx.get());
            expect(differs(want, b.decode(b.ctx.get(), list, 0, 8, 1)) == 0.0, "as before, when the second context is gone");
        }
        if (i == 199 || diff != 0.0) {
            report("cycles", m.name, 1, diff, b.ctx.get());
        }
        b.ctx.reset();
        expect(before == free_memory(), "memory is left behind in cycle " + std::to_string(i));
    }
    b.ctx = b.context(b.model.get());
}

// banks that get no memory: the first, one in the middle, the last, all of them
static void case_alloc(bed & b, int seed) {
    const auto list = b.tokens(24, seed);
    b.clear(b.ctx_ref.get());
    const auto want = b.decode(b.ctx_ref.get(), list, 0, 24, 1);
    const int n_layer = llama_model_n_layer(b.model.get());
    for (const int at : { 0, n_layer/2, n_layer - 1 }) {
        for (const int times : { 1, 1000000 }) {
            const mode m = { "alloc", HALF, { { "FAULT_ALLOC", std::to_string(n_layer + at) }, { "FAULT_ALLOCS", std::to_string(times) } } };
            b.init(m);
            b.clear(b.ctx.get());
            report("alloc", std::to_string(at) + "x" + std::to_string(times), 1, differs(want, b.decode(b.ctx.get(), list, 0, 24, 1)), b.ctx.get());
        }
    }
}

// with the settings of the environment: what a user would get
static void case_run(bed & b, int seed) {
    const int n_all = 200;
    const auto list = b.tokens(n_all, seed);
    b.clear(b.ctx_ref.get());
    const auto want = b.decode(b.ctx_ref.get(), list, 0, n_all, 1);
    llama_expert_cache_params p;
    p.n_slots = b.params.n_expert_slots;
    p.window  = b.params.expert_window;
    llama_expert_cache_init(b.ctx.get(), p);
    report("run", "environment", 1, differs(want, b.decode(b.ctx.get(), list, 0, n_all, 1)), b.ctx.get());
}

static const std::map<std::string, std::function<void(bed &, int)>> cases = {
    { "logits",    case_logits },
    { "mixed",     case_mixed },
    { "sequences", case_sequences },
    { "state",     case_state },
    { "abort",     case_abort },
    { "cycles",    case_cycles },
    { "alloc",     case_alloc },
    { "run",       case_run },
};

int main(int argc, char ** argv) {
    const auto found = argc > 2 ? cases.find(argv[1]) : cases.end();
    if (found == cases.end()) {
        fprintf(stderr, "usage: %s CASE -m MODEL [OPTIONS], one of:\n", argv[0]);
        for (const auto & c : cases) {
            fprintf(stderr, "  %s\n", c.first.c_str());
        }
        return 2;
    }
    common_params params;
    common_init();
    params.n_ctx      = 1024;
    params.n_batch    = 512;
    params.fit_params = false;
    if (!common_params_parse(argc - 1, argv + 1, params, LLAMA_EXAMPLE_COMMON)) {
        return 2;
    }
    llama_backend_init();
    {
        bed b(params);
        found->second(b, (int) params.sampling.seed);
    }
    llama_backend_free();
    fprintf(stderr, "%s: %d failed\n", found->first.c_str(), n_failed);
    return n_failed > 0 ? 1 : 0;
}
