// SPDX-License-Identifier: MIT

// The expert cache against the CPU alone, by value: test-expert-cache CASE -m MODEL [OPTIONS]. A line
// of JSON for each run. Both sides have to compute with the same kernels: simulated or remote devices, -nr, -t 1.

#include "expert-cache-bed.h"

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
            std::vector<bed::entry> entries;
            for (int s = 0; s < n_seq; s++) {
                entries.push_back({ lists[s][i], i, s });
            }
            if (bed::decode(c, entries) != 0) {
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
            const int code = bed::decode(b.ctx.get(), { { list[20], 20, 0 } });
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

static std::string state(const llama_context * ctx) {
    const std::string json = llama_expert_cache_json(ctx);
    return json.substr(0, json.find(", \"window\""));
}

// off, with a reason, and on again
static void case_reasons(bed & b, int seed) {
    const auto list = b.tokens(12, seed);
    b.clear(b.ctx_ref.get());
    const auto want = b.decode(b.ctx_ref.get(), list, 0, 12, 1);
    const std::string active = "{\"status\": \"active\", \"reason\": \"\"";
    const auto same = [&](const char * what) {
        b.clear(b.ctx.get());
        expect(differs(want, b.decode(b.ctx.get(), list, 0, 12, 1)) == 0.0, std::string("logits differ: ") + what);
    };
    for (int i = 0; i < 3; i++) { // made anew over the old one, or taken away
        b.init(modes[i]);
        expect(state(b.ctx.get()) == active, "active");
        same("active");
        llama_expert_cache_init(b.ctx.get(), {});
        expect(state(b.ctx.get()) == "{\"status\": \"off\", \"reason\": \"not asked for (--moe-expert-cache N)\"}", "taken away");
        same("taken away");
    }
    const auto other = [&](const char * reason, const std::function<void(options &)> & change) {
        const options saved = b.params;
        change(b.params);
        llama_context_ptr c = b.context(b.model.get());
        b.params = saved;
        llama_expert_cache_params p;
        p.n_slots = b.slots_of(HALF);
        llama_expert_cache_init(c.get(), p);
        expect(state(c.get()).find(reason) != std::string::npos, std::string("reason: ") + reason + ", is " + state(c.get()));
        b.decode(c.get(), list, 0, 12, 1);
    };
    other("an evaluation callback is set", [](options & p) {
        p.cb_eval = [](ggml_tensor *, bool ask, void *) { return !ask; };
    });
    b.configure({ "unified", HALF, {} });
    set("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1");
    other("GGML_CUDA_ENABLE_UNIFIED_MEMORY", [](options &) {});
    set("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "");
    llama_expert_cache_params p;
    p.n_slots = 8;
    llama_expert_cache_init(b.ctx_ref.get(), p);
    expect(state(b.ctx_ref.get()).find("the layer is not on a device") != std::string::npos, state(b.ctx_ref.get()));
}

// with the settings of the environment: what a user would get
static void case_run(bed & b, int seed) {
    const int n_all = 200;
    const auto list = b.tokens(n_all, seed);
    b.clear(b.ctx_ref.get());
    const auto want = b.decode(b.ctx_ref.get(), list, 0, n_all, 1);
    llama_expert_cache_params p;
    p.n_slots = b.params.n_slots;
    p.window  = b.params.window;
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
    { "reasons",   case_reasons },
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
    options params;
    if (!params.parse(argc - 2, argv + 2)) {
        fprintf(stderr, "%s: not an option, or no -m MODEL\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    ggml_backend_load_all();
    if (!params.rpc.empty()) {
        add_remote_devices(params.rpc);
    }
    {
        bed b(params);
        found->second(b, params.seed);
    }
    llama_backend_free();
    fprintf(stderr, "%s: %d failed\n", found->first.c_str(), n_failed);
    return n_failed > 0 ? 1 : 0;
}
