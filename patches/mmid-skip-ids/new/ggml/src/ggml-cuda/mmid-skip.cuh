// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-skip-ids.h"

#include <cstdint>

// dst: the MUL_MAT_ID, or the GLU of two that it is fused with
static inline bool ggml_cuda_mul_mat_id_may_skip(const ggml_tensor * dst) {
    return ggml_mul_mat_id_may_skip(dst->op == GGML_OP_GLU && dst->src[1] ? dst->src[1] : dst);
}

// As ggml_cuda_launch_mm_ids_helper, for a MUL_MAT_ID that may skip: ids may be -1 and may repeat within a token.
// What is skipped is sorted behind all experts, so that ids_src1 and ids_dst are complete; expert_bounds leaves it out.
void ggml_cuda_launch_mm_ids_helper_skip(
        const int32_t * ids, int32_t * ids_src1, int32_t * ids_dst, int32_t * expert_bounds,
        int n_experts, int n_tokens, int n_expert_used, int nchannels_y, int si1, int sis1, bool write_inverse, cudaStream_t stream);
