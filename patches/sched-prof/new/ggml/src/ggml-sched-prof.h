// SPDX-License-Identifier: MIT
#pragma once

// Where the time of a scheduled graph goes: per split and per input copy.
//
//   GGML_SCHED_PROF=1        host times. Nothing is reordered and nothing waits that would not wait anyway, so a row
//                            is launch plus the waits inside: asynchronous work shows up where the host next waits
//                            for it, the last of it outside of the graph.
//   GGML_SCHED_PROF=2        serial: each copy and each split is waited for, so rows are the devices' own times (plus
//                            one wait, for a remote device one round trip). What would overlap does not: use it to
//                            see what a part costs, and 1 to see what the whole costs.
//   GGML_SCHED_PROF_FILE=F   append to F instead of stderr; JSON lines when F ends in .jsonl
//
// Printed when a scheduler is freed, at exit, and on SIGUSR1 at the end of the scheduler's next graph (not on Windows,
// and not when the program has a use of its own for the signal). Counts go on after a print.

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

struct ggml_sched_prof;

// NULL unless GGML_SCHED_PROF is 1 or 2
ggml_sched_prof * ggml_sched_prof_new (void);
void              ggml_sched_prof_free(ggml_sched_prof * prof);

int64_t ggml_sched_prof_now        (void); // ns
void    ggml_sched_prof_do_begin   (ggml_sched_prof * prof, const ggml_backend_t * backends, int n_backends);
void    ggml_sched_prof_do_bytes   (ggml_sched_prof * prof, size_t bytes);
void    ggml_sched_prof_do_input   (ggml_sched_prof * prof, int split_id, ggml_backend_t src, ggml_backend_t dst,
                                    const ggml_tensor * input, const ggml_tensor * input_cpy, int64_t t_start);
void    ggml_sched_prof_do_split   (ggml_sched_prof * prof, int split_id, ggml_backend_t backend, ggml_cgraph * graph, int64_t t_start);
void    ggml_sched_prof_do_end     (ggml_sched_prof * prof);

// The hooks. With profiling off, prof is NULL and each is one test of it.

// start of a part
static inline int64_t ggml_sched_prof_start(const ggml_sched_prof * prof) {
    return prof ? ggml_sched_prof_now() : 0;
}

static inline void ggml_sched_prof_begin_graph(ggml_sched_prof * prof, const ggml_backend_t * backends, int n_backends) {
    if (prof) {
        ggml_sched_prof_do_begin(prof, backends, n_backends);
    }
}

// only a part of the current input is copied: may be called several times; without a call the whole tensor counts
static inline void ggml_sched_prof_bytes(ggml_sched_prof * prof, size_t bytes) {
    if (prof) {
        ggml_sched_prof_do_bytes(prof, bytes);
    }
}

// an input of split_id was copied from src to dst; may come before or after the parts of other splits
static inline void ggml_sched_prof_input(ggml_sched_prof * prof, int split_id, ggml_backend_t src, ggml_backend_t dst,
        const ggml_tensor * input, const ggml_tensor * input_cpy, int64_t t_start) {
    if (prof) {
        ggml_sched_prof_do_input(prof, split_id, src, dst, input, input_cpy, t_start);
    }
}

// split_id was computed (or launched)
static inline void ggml_sched_prof_split(ggml_sched_prof * prof, int split_id, ggml_backend_t backend, ggml_cgraph * graph, int64_t t_start) {
    if (prof) {
        ggml_sched_prof_do_split(prof, split_id, backend, graph, t_start);
    }
}

static inline void ggml_sched_prof_end_graph(ggml_sched_prof * prof) {
    if (prof) {
        ggml_sched_prof_do_end(prof);
    }
}
