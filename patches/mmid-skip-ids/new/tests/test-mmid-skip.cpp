// SPDX-License-Identifier: MIT

// MUL_MAT_ID whose ids may be -1.
//   test-mmid-skip                 CPU, plain and repacked weights: equal, bit for bit, to a product that does not skip
//   test-mmid-skip devices [RPC]   which devices take such a node, "name yes" or "name no" a line; RPC: a server to add
//   test-mmid-skip sched           host weights of which the scheduler copies the used experts to a simulated device

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-skip-ids.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

static const int N_EXPERT = 12;

struct shape {
    int64_t m;
    int64_t k;
    int     n_used;
    int     n_tokens;
    bool    broadcast; // one activation for all experts of a token
};

static std::vector<float> random_floats(size_t n, std::mt19937 & rng) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<float> out(n);
    for (float & x : out) {
        x = uniform(rng);
    }
    return out;
}

static const std::vector<uint8_t> & random_weights(ggml_type type, int64_t rows, int64_t k) {
    static std::map<ggml_type, std::vector<uint8_t>> made;
    std::vector<uint8_t> & out = made[type];
    if (!out.empty()) {
        GGML_ASSERT(out.size() == rows*ggml_row_size(type, k));
        return out;
    }
    std::mt19937 rng(type);
    const std::vector<float> x = random_floats(rows*k, rng);
    const std::vector<float> imatrix(k, 1.0f);
    out.resize(rows*ggml_row_size(type, k));
    if (type == GGML_TYPE_F32) {
        memcpy(out.data(), x.data(), out.size());
    } else {
        ggml_quantize_chunk(type, x.data(), out.data(), 0, rows, k, imatrix.data());
    }
    return out;
}

enum draw {
    DRAW_LANES,   // any id may become -1
    DRAW_EXPERTS, // all ids of an expert do or none does
    DRAW_ALL,
    DRAW_NONE,
    DRAW_REPEAT,  // as DRAW_LANES, and experts repeat within a token
};

static std::vector<int32_t> draw_ids(draw how, const shape & s, std::mt19937 & rng) {
    std::vector<int32_t> ids(s.n_used*s.n_tokens);
    std::vector<int32_t> experts(N_EXPERT);
    std::vector<bool> gone(N_EXPERT);
    for (int i = 0; i < N_EXPERT; i++) {
        experts[i] = i;
        gone[i]    = rng() % 2;
    }
    for (int t = 0; t < s.n_tokens; t++) {
        std::shuffle(experts.begin(), experts.end(), rng);
        for (int e = 0; e < s.n_used; e++) {
            const int32_t id = how == DRAW_REPEAT ? int32_t(rng() % 3) : experts[e];
            const bool skip =
                how == DRAW_EXPERTS ? bool(gone[id]) :
                how == DRAW_ALL     ? true  :
                how == DRAW_NONE    ? false : rng() % 2 == 0;
            ids[t*s.n_used + e] = skip ? -1 : id;
        }
    }
    return ids;
}

struct product {
    ggml_context_ptr ctx;
    ggml_tensor * as;
    ggml_tensor * b;
    ggml_tensor * ids;
    ggml_tensor * out;

    // n_extra: experts behind the real ones; pad: ids are a view of rows that much longer
    product(ggml_type type, const shape & s, int n_extra, bool may_skip, int pad = 3)
        : ctx(ggml_init({ 16*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })) {
        as  = ggml_new_tensor_3d(ctx.get(), type, s.k, s.m, N_EXPERT + n_extra);
        b   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, s.k, s.broadcast ? 1 : s.n_used, s.n_tokens);
        ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, s.n_used + pad, s.n_tokens);
        out = ggml_mul_mat_id(ctx.get(), as, b, pad ? ggml_view_2d(ctx.get(), ids, s.n_used, s.n_tokens, ids->nb[1], 0) : ids);
        if (may_skip) {
            ggml_mul_mat_id_set_skip(out);
        }
    }

    void set(const std::vector<uint8_t> & weights, const std::vector<float> & x, const std::vector<int32_t> & values) {
        const int64_t n_used   = out->src[2]->ne[0];
        const int64_t n_tokens = out->src[2]->ne[1];
        std::vector<int32_t> rows(ggml_nelements(ids), 123456789);
        for (int64_t t = 0; t < n_tokens; t++) {
            std::copy_n(values.begin() + t*n_used, n_used, rows.begin() + t*ids->ne[0]);
        }
        const std::vector<uint8_t> garbage(ggml_nbytes(out), 0xff);
        ggml_backend_tensor_set(as,  weights.data(), 0, ggml_nbytes(as));
        ggml_backend_tensor_set(b,   x.data(),       0, ggml_nbytes(b));
        ggml_backend_tensor_set(ids, rows.data(),    0, ggml_nbytes(ids));
        ggml_backend_tensor_set(out, garbage.data(), 0, ggml_nbytes(out));
    }

    std::vector<float> get() const {
        std::vector<float> data(ggml_nelements(out));
        ggml_backend_tensor_get(out, data.data(), 0, ggml_nbytes(out));
        return data;
    }

    ggml_cgraph * graph() const {
        ggml_cgraph * gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, out);
        return gf;
    }
};

// The product with the weights in a buffer of the given type; empty if the backend does not take the node there.
static std::vector<float> run(ggml_backend_t backend, ggml_backend_buffer_type_t weights_buft, product & p,
        const std::vector<uint8_t> & weights, const std::vector<float> & x, const std::vector<int32_t> & ids) {
    ggml_backend_buffer_ptr bank(ggml_backend_buft_alloc_buffer(weights_buft, ggml_backend_buft_get_alloc_size(weights_buft, p.as)));
    ggml_backend_tensor_alloc(bank.get(), p.as, ggml_backend_buffer_get_base(bank.get()));
    ggml_backend_buffer_ptr rest(ggml_backend_alloc_ctx_tensors(p.ctx.get(), backend));
    if (!ggml_backend_supports_op(backend, p.out)) {
        return {};
    }
    p.set(weights, x, ids);
    GGML_ASSERT(ggml_backend_graph_compute(backend, p.graph()) == GGML_STATUS_SUCCESS);
    return p.get();
}

// What it has to be: each skipped lane uses an expert that nobody else does, and its row is zeroed by hand afterwards.
static bool check(ggml_backend_t backend, ggml_backend_buffer_type_t weights_buft, ggml_type type, const shape & s, draw how, int & n_done) {
    std::mt19937 rng(s.n_tokens*31 + how);
    const std::vector<uint8_t> & weights = random_weights(type, s.m*(N_EXPERT + s.n_used), s.k);
    const std::vector<float>   x   = random_floats(s.k*s.n_used*s.n_tokens, rng);
    const std::vector<int32_t> ids = draw_ids(how, s, rng);

    std::vector<int32_t> instead = ids;
    for (size_t i = 0; i < ids.size(); i++) {
        instead[i] = ids[i] < 0 ? N_EXPERT + int32_t(i % s.n_used) : ids[i];
    }
    // ids that repeat would overrun the row table of repacked weights, unless the node may skip
    product stock(type, s, s.n_used, how == DRAW_REPEAT && !ggml_backend_buft_is_host(weights_buft));
    product skips(type, s, s.n_used, true);
    std::vector<float> expected = run(backend, weights_buft, stock, weights, x, instead);
    std::vector<float> found    = run(backend, weights_buft, skips, weights, x, ids);
    if (expected.empty() && found.empty()) {
        return true;
    }
    for (size_t i = 0; i < ids.size(); i++) {
        if (ids[i] < 0) {
            std::fill_n(expected.begin() + i*s.m, s.m, 0.0f);
        }
    }
    n_done++;
    if (expected.size() == found.size() && memcmp(expected.data(), found.data(), found.size()*sizeof(float)) == 0) {
        return true;
    }
    fprintf(stderr, "FAIL %s in %s, m %d k %d used %d tokens %d broadcast %d draw %d\n", ggml_type_name(type),
        ggml_backend_buft_name(weights_buft), int(s.m), int(s.k), s.n_used, s.n_tokens, s.broadcast, how);
    return false;
}

static ggml_backend_ptr cpu_backend(int n_threads) {
    ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    const auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu.get())), "ggml_backend_set_n_threads");
    set_threads(cpu.get(), n_threads);
    return cpu;
}

static std::vector<ggml_backend_buffer_type_t> weight_bufts(ggml_backend_t cpu) {
    std::vector<ggml_backend_buffer_type_t> out = { ggml_backend_get_default_buffer_type(cpu) };
    ggml_backend_dev_t dev = ggml_backend_get_device(cpu);
    const auto extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * buft = extra ? extra(dev) : nullptr; buft && *buft; buft++) {
        out.push_back(*buft);
    }
    return out;
}

static int run_cpu() {
    int n_failed = 0;
    for (int n_threads : { 1, 2, 3 }) {
        ggml_backend_ptr cpu = cpu_backend(n_threads);
        for (ggml_backend_buffer_type_t buft : weight_bufts(cpu.get())) {
            int n_done = 0;
            std::string types;
            for (int t = 0; t < GGML_TYPE_COUNT; t++) {
                const ggml_type type = ggml_type(t);
                if (ggml_blck_size(type) == 0 || (!ggml_is_quantized(type) && type != GGML_TYPE_F32 && type != GGML_TYPE_F16 && type != GGML_TYPE_BF16) ||
                        type == GGML_TYPE_Q8_1 || type == GGML_TYPE_Q8_K) {
                    continue;
                }
                const int before = n_done;
                for (int n_tokens : { 1, 2, 4, 8, 9, 16, 31, 32, 33, 64, 512 }) {
                    for (draw how : { DRAW_LANES, DRAW_EXPERTS, DRAW_ALL, DRAW_NONE, DRAW_REPEAT }) {
                        const shape s = { 64, 256, 4, n_tokens, n_tokens % 2 == 0 };
                        n_failed += !check(cpu.get(), buft, type, s, how, n_done);
                    }
                }
                types += n_done > before ? std::string(" ") + ggml_type_name(type) : "";
            }
            printf("%s, %d threads: %d cases,%s\n", ggml_backend_buft_name(buft), n_threads, n_done, types.c_str());
        }
    }
    printf("%d failed\n", n_failed);
    return n_failed != 0;
}

static int run_devices(const char * rpc) {
    if (rpc) {
        ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
        const auto add = (ggml_backend_reg_t (*)(const char *)) (reg ? ggml_backend_reg_get_proc_address(reg, "ggml_backend_rpc_add_server") : nullptr);
        GGML_ASSERT(add && "no RPC in this build");
        ggml_backend_register(add(rpc));
    }
    product p(GGML_TYPE_Q4_0, { 64, 256, 2, 4, false }, 0, true);
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        printf("%s %s\n", ggml_backend_dev_name(dev), ggml_backend_dev_supports_op(dev, p.out) ? "yes" : "no");
    }
    return 0;
}

// Prints where each product ran.
static int run_sched() {
    ggml_backend_ptr sim(ggml_backend_init_by_name("SIM0", nullptr));
    GGML_ASSERT(sim && "set GGML_SIM_DEVICES");
    ggml_backend_ptr cpu = cpu_backend(1);
    ggml_backend_t backends[] = { sim.get(), cpu.get() };
    const shape s = { 64, 256, 4, 64, false };

    for (draw how : { DRAW_LANES, DRAW_EXPERTS, DRAW_ALL, DRAW_NONE }) {
        std::mt19937 rng(how);
        const std::vector<uint8_t> & weights = random_weights(GGML_TYPE_Q4_K, s.m*N_EXPERT, s.k);
        const std::vector<float>   x   = random_floats(s.k*s.n_used*s.n_tokens, rng);
        const std::vector<int32_t> ids = draw_ids(how, s, rng);

        product on_cpu(GGML_TYPE_Q4_K, s, 0, true);
        const std::vector<float> expected = run(cpu.get(), ggml_backend_get_default_buffer_type(cpu.get()), on_cpu, weights, x, ids);

        product p(GGML_TYPE_Q4_K, s, 0, true, /*pad =*/ 0);
        ggml_backend_buffer_ptr bank(ggml_backend_alloc_buffer(cpu.get(), ggml_nbytes(p.as)));
        ggml_backend_buffer_set_usage(bank.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_alloc(bank.get(), p.as, ggml_backend_buffer_get_base(bank.get()));
        ggml_set_input(p.b);
        ggml_set_input(p.ids);
        ggml_set_output(p.out);

        ggml_backend_sched_ptr sched(ggml_backend_sched_new(backends, nullptr, 2, 64, false, true));
        ggml_cgraph * gf = p.graph();
        GGML_ASSERT(ggml_backend_sched_alloc_graph(sched.get(), gf));
        p.set(weights, x, ids);
        GGML_ASSERT(ggml_backend_sched_graph_compute(sched.get(), gf) == GGML_STATUS_SUCCESS);
        printf("%s\n", ggml_backend_name(ggml_backend_sched_get_tensor_backend(sched.get(), p.out)));
        if (p.get() != expected) {
            fprintf(stderr, "FAIL draw %d\n", how);
            return 1;
        }
    }
    return 0;
}

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    ggml_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
            fputs(text, stderr);
        }
    }, nullptr);
    ggml_backend_load_all();
    return what == "devices" ? run_devices(argc > 2 ? argv[2] : nullptr) : what == "sched" ? run_sched() : run_cpu();
}
