// SPDX-License-Identifier: MIT
// Part of test-backend-ops.cpp: MUL_MAT_ID whose ids may be -1.

#include "ggml-skip-ids.h"

// Each token names n_used experts, all different or, with repeat, drawn at will; then skip percent of all ids become -1.
struct test_mul_mat_id_skip : public test_mul_mat_id {
    const int skip;
    const bool repeat;
    const bool glu; // gate and up and their GLU, which a backend may fuse

    test_mul_mat_id_skip(ggml_type type_a, int n_mats, int n_used, bool b, int64_t m, int64_t n, int64_t k,
            int skip, bool repeat = false, bool glu = false)
        : test_mul_mat_id(type_a, GGML_TYPE_F32, n_mats, n_used, b, m, n, k), skip(skip), repeat(repeat), glu(glu) {}

    std::string op_desc(ggml_tensor *) override { return "MUL_MAT_ID_SKIP"; }

    std::string vars() override {
        return test_mul_mat_id::vars() + "," + VARS_TO_STR3(skip, repeat, glu);
    }

    bool run_whole_graph() override { return glu; }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        ggml_tensor * out = test_mul_mat_id::build_graph(ctx);
        ggml_mul_mat_id_set_skip(out);
        if (!glu) {
            return out;
        }
        ggml_tensor * gate_as = ggml_new_tensor_3d(ctx, type_a, k, m, n_mats);
        ggml_tensor * gate = ggml_mul_mat_id(ctx, gate_as, out->src[1], out->src[2]);
        ggml_mul_mat_id_set_skip(gate);
        return ggml_swiglu_split(ctx, gate, out);
    }

    // the result is filled as well, so a row that is left alone shows
    void initialize_tensors(ggml_context * ctx) override {
        test_mul_mat_id::initialize_tensors(ctx);
        set_ids(ctx);
    }

    void reinit_perf_iter(ggml_context * ctx) override { set_ids(ctx); }

    void set_ids(ggml_context * ctx) {
        std::default_random_engine rng(n);
        std::uniform_int_distribution<int> any_expert(0, n_mats - 1);
        std::uniform_int_distribution<int> percent(0, 99);

        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
            if (t->type != GGML_TYPE_I32 || ggml_is_view_op(t->op)) {
                continue;
            }
            std::vector<int32_t> ids(ggml_nelements(t));
            for (int64_t i1 = 0; i1 < t->ne[1]; i1++) {
                int32_t * row = ids.data() + i1*t->ne[0];
                for (int64_t i0 = 0; i0 < t->ne[0]; i0++) {
                    row[i0] = repeat ? any_expert(rng) : i0;
                }
                std::shuffle(row, row + t->ne[0], rng);
                for (int64_t i0 = 0; i0 < t->ne[0]; i0++) {
                    row[i0] = percent(rng) < skip ? -1 : row[i0];
                }
            }
            ggml_backend_tensor_set(t, ids.data(), 0, ggml_nbytes(t));
        }
    }
};

static void add_mul_mat_id_skip_cases(std::vector<std::unique_ptr<test_case>> & test_cases) {
    const auto add = [&](ggml_type type, int n_mats, int n_used, bool b, int64_t m, int64_t n, int64_t k, int skip, bool repeat = false, bool glu = false) {
        test_cases.emplace_back(new test_mul_mat_id_skip(type, n_mats, n_used, b, m, n, k, skip, repeat, glu));
    };

    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K,
                            GGML_TYPE_IQ3_S, GGML_TYPE_IQ1_M, GGML_TYPE_MXFP4 }) {
        for (int n : { 1, 2, 4, 8, 9, 16, 31, 32, 33, 64, 512 }) {
            for (bool b : { false, true }) {
                add(type, 16, 4, b, 128, n, 256, 50);
                add(type, 16, 4, b, 128, n, 256, 50, true);
            }
            add(type, 16, 4, false, 128, n, 256, 100);
            add(type, 16, 4, false, 128, n, 256, 0);
            add(type, 16, 4, false, 128, n, 256, 0, true);
            add(type, 16, 4, true,  128, n, 256, 50, false, true);
        }
    }

    for (ggml_type type : all_types) {
        for (int n : { 1, 8, 9, 33 }) {
            add(type, 8, 2, false, 128, n, 256, 50);
            add(type, 8, 3, true,  96,  n, 256, 50, true);
        }
    }

    // numbers of experts in use that have kernels of their own, many experts, rows that are no multiple of a tile
    for (int n : { 1, 8, 31, 64 }) {
        for (int n_used : { 1, 2, 6, 8, 10, 16, 32 }) {
            add(GGML_TYPE_Q4_K, 64, n_used, true, 64, n, 256, 50);
        }
        add(GGML_TYPE_Q4_0, 512, 10, false, 256, n, 128, 90);
        add(GGML_TYPE_F16,  16,  16, false, 50,  n, 64,  50);
        add(GGML_TYPE_F32,  16,  16, true,  50,  n, 63,  50, true);
    }
}
