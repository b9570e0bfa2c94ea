// SPDX-License-Identifier: MIT
#pragma once

// Lets a device compute while the CPU does.
//
// The scheduler runs splits one after the other and fetches a split's inputs just before it: a CPU split whose inputs
// come from a device waits for all that the device was given, also for work that it does not need. So of two branches
//
//     device: x ──┬── hit branch ──┐
//     CPU:        └── miss branch ─┴── device: sum
//
// the second begins when the first is over. Where the graph's builder marks the first node of the device's branch, the
// scheduler begins a split there and fetches the inputs of the CPU split behind it before it launches the device's.
//
// The CPU's result is sent in the order of the device's queue. It may still be on its way when the graph returns: with
// marks, ggml_backend_sched_synchronize() comes before the inputs of the next graph are written.
//
// Without marks nothing is done. Marks have no effect with pipeline parallelism, under an eval callback, and with
// GGML_SCHED_OVERLAP=0.

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

    // node: not a view, on a device. Between building and allocating the graph; a reset of the scheduler forgets it.
    GGML_API void ggml_backend_sched_mark_overlap(ggml_backend_sched_t sched, struct ggml_tensor * node);

    // how often a CPU split's inputs were fetched early, since the scheduler was made
    GGML_API int64_t ggml_backend_sched_n_overlaps(ggml_backend_sched_t sched);

#ifdef __cplusplus
}
#endif
