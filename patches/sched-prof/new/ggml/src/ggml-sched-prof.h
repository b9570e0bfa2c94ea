// SPDX-License-Identifier: MIT
#pragma once

// Where the time of a scheduled graph goes: per split and per input copy.
//
//   GGML_SCHED_PROF=1        host time of each copy and each launch. Nothing is reordered and nothing waits that would
//                            not wait anyway: asynchronous work shows up where the host next waits for it.
//   GGML_SCHED_PROF=2        serial: each copy and each split is waited for, so times are the devices' own. What would
//                            overlap does not; wall time is then the sum of its parts.
//   GGML_SCHED_PROF_FILE=F   append there instead of stderr; JSON lines when F ends in .jsonl
//
// Printed when a scheduler is freed, at exit, and on SIGUSR1 (at the end of the graph that is running then).

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

struct ggml_sched_prof;

// NULL unless GGML_SCHED_PROF is set to 1 or 2: all hooks are then one test of a pointer
ggml_sched_prof * ggml_sched_prof_new (void);
void              ggml_sched_prof_free(ggml_sched_prof * prof);

int64_t ggml_sched_prof_now(void); // ns

void ggml_sched_prof_begin(ggml_sched_prof * prof);
void ggml_sched_prof_end  (ggml_sched_prof * prof);

// a part of a tensor was copied for the current input; without such a call the whole tensor counts
void ggml_sched_prof_bytes(ggml_sched_prof * prof, size_t bytes);

void ggml_sched_prof_input(ggml_sched_prof * prof, ggml_backend_t src, ggml_backend_t dst,
        const struct ggml_tensor * input, int64_t t_start);

void ggml_sched_prof_split(ggml_sched_prof * prof, ggml_backend_t backend, struct ggml_cgraph * graph, int64_t t_start);
