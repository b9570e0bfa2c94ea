// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"
#include "ggml-backend.h"

#ifdef  __cplusplus
extern "C" {
#endif

// Simulated discrete GPUs: memory of their own, asynchronous queues, links with a bandwidth. Arithmetic is the CPU backend's.
// The devices are described by GGML_SIM_DEVICES; without it there are none. See docs/sim-device.md.

GGML_BACKEND_API ggml_backend_reg_t ggml_backend_sim_reg(void);

GGML_BACKEND_API bool ggml_backend_is_sim(ggml_backend_t backend);

#ifdef  __cplusplus
}
#endif
