// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpu-impl.h"
#include "ggml-skip-ids.h"

#include <string.h>

// how many rows an expert can get: one for each token, unless its id may repeat within a token
static inline int64_t ggml_mul_mat_id_max_rows(const struct ggml_tensor * dst) {
    const struct ggml_tensor * ids = dst->src[2];

    return ggml_mul_mat_id_may_skip(dst) ? ids->ne[0]*ids->ne[1] : ids->ne[1];
}

// Zeroes this thread's share of the rows that a MUL_MAT_ID skips. Needs no barrier: nothing else writes these rows.
static inline void ggml_mul_mat_id_zero_skipped(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const struct ggml_tensor * ids = dst->src[2];

    const int64_t n_ids  = ids->ne[0];
    const int64_t n_rows = ids->ne[0]*ids->ne[1];

    for (int64_t ir = params->ith; ir < n_rows; ir += params->nth) {
        const int64_t i1 = ir % n_ids;
        const int64_t i2 = ir / n_ids;

        if (*(const int32_t *) ((const char *) ids->data + i1*ids->nb[0] + i2*ids->nb[1]) < 0) {
            memset((char *) dst->data + i1*dst->nb[1] + i2*dst->nb[2], 0, dst->ne[0]*sizeof(float));
        }
    }
}
