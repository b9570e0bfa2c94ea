// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"

#ifdef  __cplusplus
extern "C" {
#endif

// A MUL_MAT_ID that may skip: an id may be -1. No expert is read for it, and its row of the result is zero.
// Ids may also repeat within a token. Backends that do not know this refuse the node (ggml_backend_dev_supports_op).

GGML_API void ggml_mul_mat_id_set_skip(struct ggml_tensor * node);

GGML_API bool ggml_mul_mat_id_may_skip(const struct ggml_tensor * node);

#ifdef  __cplusplus
}
#endif
