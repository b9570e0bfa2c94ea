// SPDX-License-Identifier: MIT

#include "ggml-skip-ids.h"
#include "ggml-skip-ids-impl.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstdlib>
#include <cstring>

// slots 0 to 3 are precisions and a hint [TAG_GGML_PREC]
static const int SKIP_PARAM = 4;

void ggml_mul_mat_id_set_skip(ggml_tensor * node) {
    GGML_ASSERT(node->op == GGML_OP_MUL_MAT_ID);
    ggml_set_op_params_i32(node, SKIP_PARAM, 1);
}

bool ggml_mul_mat_id_may_skip(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT_ID && ggml_get_op_params_i32(node, SKIP_PARAM) != 0;
}

static bool env_or(const char * name, bool by_default) {
    const char * value = getenv(name);
    return value && *value ? atoi(value) != 0 : by_default;
}

static bool backend_skips(const char * name) {
    static const bool cuda = env_or("GGML_CUDA_SKIP_IDS", false); // until its kernels have been seen to work on a GPU
    static const bool sim  = env_or("GGML_SIM_SKIP_IDS",  true);
    static const bool rpc  = env_or("GGML_RPC_SKIP_IDS",  false); // an older server dies of an id of -1

    return strcmp(name, "CPU") == 0 ||
        (cuda && strcmp(name, "CUDA") == 0) ||
        (sim  && strcmp(name, "SIM")  == 0) ||
        (rpc  && strcmp(name, "RPC")  == 0);
}

bool ggml_backend_dev_may_run_skip(ggml_backend_dev_t dev, const ggml_tensor * op) {
    if (!ggml_mul_mat_id_may_skip(op)) {
        return true;
    }
    // a meta device belongs to no registry and asks its own devices
    return dev->reg == nullptr || backend_skips(ggml_backend_reg_name(dev->reg));
}
