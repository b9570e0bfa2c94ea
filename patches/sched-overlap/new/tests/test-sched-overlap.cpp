// SPDX-License-Identifier: MIT

// Two branches of a graph, one on a device and one on the CPU: test-sched-overlap CASE [TOKENS]. Needs GGML_SIM_DEVICES.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-sched-overlap.h"

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

static void expect(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what);
        exit(1);
    }
}
#define EXPECT(x) expect(x, #x)

static ggml_backend_t init(const char * name) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(name);
    if (!dev) {
        fprintf(stderr, "no device %s: set GGML_SIM_DEVICES\n", name);
        exit(2);
    }
    return ggml_backend_dev_init(dev, nullptr);
}

static ggml_backend_t init_cpu(int n_threads) {
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    const auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), "ggml_backend_set_n_threads");
    set_threads(cpu, n_threads);
    return cpu;
}

enum branches { BOTH, HIT_ONLY, MISS_ONLY };

// Layers of: x -> router (device) -> hit branch (device) and miss branch (CPU) -> their sum (device), the next x.
struct model {
    int n, n_tokens, n_layer, depth;
    ggml_context_ptr        ctx_dev, ctx_cpu;
    ggml_backend_buffer_ptr buf_dev, buf_cpu;
    std::vector<ggml_tensor *> router, hit, miss;

    model(ggml_backend_t dev, ggml_backend_t cpu, int n, int n_tokens, int n_layer, int depth)
            : n(n), n_tokens(n_tokens), n_layer(n_layer), depth(depth) {
        const ggml_init_params params = { 3*(size_t) n_layer*ggml_tensor_overhead(), nullptr, true };
        ctx_dev.reset(ggml_init(params));
        ctx_cpu.reset(ggml_init(params));
        for (int il = 0; il < n_layer; il++) {
            router.push_back(ggml_new_tensor_2d(ctx_dev.get(), GGML_TYPE_F32, n, n));
            hit.push_back   (ggml_new_tensor_2d(ctx_dev.get(), GGML_TYPE_F32, n, n));
            miss.push_back  (ggml_new_tensor_2d(ctx_cpu.get(), GGML_TYPE_F32, n, n));
        }
        buf_dev.reset(ggml_backend_alloc_ctx_tensors(ctx_dev.get(), dev));
        buf_cpu.reset(ggml_backend_alloc_ctx_tensors(ctx_cpu.get(), cpu));
        ggml_backend_buffer_set_usage(buf_dev.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_set_usage(buf_cpu.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        std::mt19937 rng(1);
        std::uniform_real_distribution<float> weight(-1.7f, 1.7f);
        std::vector<float> data((size_t) n*n);
        for (auto * list : { &router, &hit, &miss }) {
            for (ggml_tensor * w : *list) {
                for (float & v : data) {
                    v = weight(rng)/std::sqrt((float) n);
                }
                ggml_backend_tensor_set(w, data.data(), 0, ggml_nbytes(w));
            }
        }
    }

    struct run {
        ggml_context_ptr ctx;
        ggml_cgraph    * graph;
        ggml_tensor    * x;
        ggml_tensor    * y;
        std::vector<ggml_tensor *> marks; // the first nodes of the hit branches
    };

    run build(branches which) const {
        run r;
        const size_t nodes = (size_t) n_layer*(2*depth + 8) + 16;
        r.ctx.reset(ggml_init({ nodes*ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false), nullptr, true }));
        ggml_context * ctx = r.ctx.get();
        r.graph = ggml_new_graph_custom(ctx, nodes, false);
        r.x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n_tokens);
        ggml_set_input(r.x);
        ggml_tensor * cur = r.x;
        for (int il = 0; il < n_layer; il++) {
            cur = ggml_mul_mat(ctx, router[il], cur);
            ggml_build_forward_expand(r.graph, cur);
            ggml_tensor * a = nullptr;
            ggml_tensor * b = nullptr;
            if (which != MISS_ONLY) {
                a = ggml_reshape_2d(ctx, cur, n, n_tokens); // as a builder's reshape: marks are on what computes
                for (int i = 0; i < depth; i++) {
                    a = ggml_mul_mat(ctx, hit[il], a);
                    if (i == 0) {
                        r.marks.push_back(a);
                    }
                }
                ggml_build_forward_expand(r.graph, a);
            }
            if (which != HIT_ONLY) {
                b = cur;
                for (int i = 0; i < depth; i++) {
                    b = ggml_mul_mat(ctx, miss[il], b);
                }
                ggml_build_forward_expand(r.graph, b);
            }
            cur = a && b ? ggml_add(ctx, a, b) : a ? a : b;
            cur = ggml_norm(ctx, cur, 1e-5f);
        }
        r.y = ggml_mul_mat(ctx, router[0], cur); // on the device: the last sum is not the CPU's
        ggml_set_output(r.y);
        ggml_build_forward_expand(r.graph, r.y);
        return r;
    }

    std::vector<float> input(int step) const {
        std::vector<float> x((size_t) n*n_tokens);
        for (size_t i = 0; i < x.size(); i++) {
            x[i] = (float) ((i*7 + step*13)%31)/31 - 0.4f;
        }
        return x;
    }
};

struct scheduler {
    ggml_backend_ptr dev, cpu;
    ggml_backend_sched_ptr sched;

    explicit scheduler(bool parallel = false) : dev(init("SIM0")), cpu(init_cpu(1)) {
        ggml_backend_t list[] = { dev.get(), cpu.get() };
        // as llama.cpp: the host computes in memory that the device reads by itself
        ggml_backend_buffer_type_t bufts[] = { ggml_backend_get_default_buffer_type(dev.get()),
            ggml_backend_dev_host_buffer_type(ggml_backend_get_device(dev.get())) };
        sched.reset(ggml_backend_sched_new(list, bufts, 2, 4096, parallel, /*op_offload =*/ false));
    }

    void alloc(const model::run & r, bool mark) {
        ggml_backend_sched_reset(sched.get());
        if (mark) {
            for (ggml_tensor * node : r.marks) {
                ggml_backend_sched_mark_overlap(sched.get(), node);
            }
        }
        EXPECT(ggml_backend_sched_alloc_graph(sched.get(), r.graph));
    }

    std::vector<float> compute(const model::run & r, const std::vector<float> & x) {
        ggml_backend_tensor_set(r.x, x.data(), 0, ggml_nbytes(r.x));
        EXPECT(ggml_backend_sched_graph_compute(sched.get(), r.graph) == GGML_STATUS_SUCCESS);
        std::vector<float> y(ggml_nelements(r.y));
        ggml_backend_tensor_get(r.y, y.data(), 0, ggml_nbytes(r.y));
        return y;
    }

    int splits() const { return ggml_backend_sched_get_n_splits(sched.get()); }
    int64_t overlaps() const { return ggml_backend_sched_n_overlaps(sched.get()); }
};

static bool enabled() {
    const char * text = getenv("GGML_SCHED_OVERLAP");
    return !text || strcmp(text, "0") != 0;
}

// the same numbers with marks and without, step after step on the same allocation
static int case_values(int n_tokens) {
    scheduler plain, marked;
    model m(plain.dev.get(), plain.cpu.get(), 128, n_tokens, 3, 3);
    model::run a = m.build(BOTH);
    model::run b = m.build(BOTH);
    plain .alloc(a, false);
    marked.alloc(b, true);
    EXPECT(marked.splits() == plain.splits() + (enabled() ? 3 : 0));
    for (int step = 0; step < 20; step++) {
        EXPECT(plain.compute(a, m.input(step)) == marked.compute(b, m.input(step)));
    }
    EXPECT(plain.overlaps() == 0);
    EXPECT(marked.overlaps() == (enabled() ? 20*3 : 0));
    // a reset forgets the marks
    model::run c = m.build(BOTH);
    marked.alloc(c, false);
    EXPECT(marked.splits() == plain.splits());
    EXPECT(marked.compute(c, m.input(0)) == plain.compute(a, m.input(0)));
    EXPECT(marked.overlaps() == (enabled() ? 20*3 : 0));
    return 0;
}

static bool see_nothing(ggml_tensor *, bool ask, void *) {
    return !ask;
}

// marks change nothing with pipeline parallelism and under an eval callback, also one that comes later
static int case_inert(int n_tokens) {
    scheduler plain, parallel(true), called;
    model m(plain.dev.get(), plain.cpu.get(), 128, n_tokens, 3, 3);
    model::run a = m.build(BOTH);
    plain.alloc(a, false);
    const std::vector<float> want = plain.compute(a, m.input(0));

    scheduler parallel_plain(true);
    model::run b = m.build(BOTH);
    model::run c = m.build(BOTH);
    parallel      .alloc(b, true);
    parallel_plain.alloc(c, false);
    EXPECT(parallel.splits() == parallel_plain.splits());
    EXPECT(parallel.compute(b, m.input(0)) == want);
    EXPECT(parallel.overlaps() == 0);

    model::run d = m.build(BOTH);
    ggml_backend_sched_set_eval_callback(called.sched.get(), see_nothing, nullptr);
    called.alloc(d, true);
    EXPECT(called.splits() == plain.splits());
    EXPECT(called.compute(d, m.input(0)) == want);

    ggml_backend_sched_set_eval_callback(called.sched.get(), nullptr, nullptr);
    model::run e = m.build(BOTH);
    called.alloc(e, true);
    EXPECT(called.compute(e, m.input(0)) == want);
    const int64_t count = called.overlaps();
    EXPECT(count == (enabled() ? 3 : 0));
    ggml_backend_sched_set_eval_callback(called.sched.get(), see_nothing, nullptr);
    EXPECT(called.compute(e, m.input(0)) == want);
    EXPECT(called.overlaps() == count);
    return 0;
}

// A miss branch that needs the hit branch's result cannot be early; a mark that leads nowhere does no harm.
static int case_dependent(int n_tokens) {
    scheduler plain, marked;
    model m(plain.dev.get(), plain.cpu.get(), 128, n_tokens, 1, 1);
    const auto build = [&](scheduler & s, bool mark, std::vector<float> & y) {
        ggml_context_ptr holder(ggml_init({ 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        ggml_context * ctx = holder.get();
        model::run r;
        r.graph = ggml_new_graph(ctx);
        r.x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, m.n, n_tokens);
        ggml_set_input(r.x);
        ggml_tensor * a = ggml_mul_mat(ctx, m.router[0], r.x);
        ggml_build_forward_expand(r.graph, a);
        ggml_tensor * b = ggml_mul_mat(ctx, m.hit[0], a);
        ggml_tensor * c = ggml_mul_mat(ctx, m.miss[0], ggml_reshape_2d(ctx, b, m.n, n_tokens));
        r.y = ggml_mul_mat(ctx, m.hit[0], c);
        ggml_set_output(r.y);
        ggml_build_forward_expand(r.graph, r.y);
        r.marks = { b, r.y };
        s.alloc(r, mark);
        y = s.compute(r, m.input(0));
    };
    std::vector<float> want, got;
    build(plain, false, want);
    build(marked, true, got);
    EXPECT(want == got);
    EXPECT(marked.overlaps() == 0);
    return 0;
}

// wall time of both branches over the longer of them, each the least of several
static int case_time(int n_tokens) {
    scheduler s;
    model m(s.dev.get(), s.cpu.get(), 1024, n_tokens, 4, 6);
    const auto least = [&](branches which, bool mark) {
        model::run r = m.build(which);
        s.alloc(r, mark);
        double best = 1e9;
        for (int i = 0; i < 30; i++) {
            const std::vector<float> x = m.input(i);
            const int64_t start = ggml_time_us();
            s.compute(r, x);
            best = std::min(best, (ggml_time_us() - start)/1e3);
        }
        return best;
    };
    const double hit = least(HIT_ONLY, false), miss = least(MISS_ONLY, false);
    const double plain = least(BOTH, false), marked = least(BOTH, true);
    printf("{\"hit_ms\": %.3f, \"miss_ms\": %.3f, \"plain_ms\": %.3f, \"marked_ms\": %.3f, \"ratio\": %.3f}\n",
        hit, miss, plain, marked, marked/std::max(hit, miss));
    return 0;
}

static const std::map<std::string, std::function<int(int)>> cases = {
    { "values",    case_values },
    { "inert",     case_inert },
    { "dependent", case_dependent },
    { "time",      case_time },
};

int main(int argc, char ** argv) {
    const auto found = argc == 2 || argc == 3 ? cases.find(argv[1]) : cases.end();
    const int n_tokens = argc == 3 ? atoi(argv[2]) : 1;
    if (found == cases.end() || n_tokens < 1) {
        fprintf(stderr, "usage: %s CASE [TOKENS], one of:\n", argv[0]);
        for (const auto & c : cases) {
            fprintf(stderr, "  %s\n", c.first.c_str());
        }
        return 2;
    }
    ggml_time_init();
    const int code = found->second(n_tokens);
    fprintf(stderr, "%s: done\n", argv[1]);
    return code;
}
