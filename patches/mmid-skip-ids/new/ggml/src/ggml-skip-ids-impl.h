// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"

// false: a MUL_MAT_ID that may skip, on a device that is not known to do so
bool ggml_backend_dev_may_run_skip(ggml_backend_dev_t dev, const struct ggml_tensor * op);
