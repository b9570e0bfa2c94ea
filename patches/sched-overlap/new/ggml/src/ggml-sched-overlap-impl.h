// SPDX-License-Identifier: MIT
#pragma once

// What ggml-backend.cpp asks of ggml-sched-overlap.cpp.

#include "ggml-backend.h"
#include "ggml-sched-prof.h"

struct ggml_sched_overlap;

ggml_sched_overlap * ggml_sched_overlap_new  (void);
void                 ggml_sched_overlap_free (ggml_sched_overlap * ov);
void                 ggml_sched_overlap_reset(ggml_sched_overlap * ov); // forgets the marks

void    ggml_sched_overlap_add  (ggml_sched_overlap * ov, const ggml_tensor * node);
int64_t ggml_sched_overlap_count(const ggml_sched_overlap * ov);

// A graph is about to be split; inert: marks shall not count.
void ggml_sched_overlap_begin(ggml_sched_overlap * ov, bool inert);
// Whether split_id has to begin at node.
bool ggml_sched_overlap_cut(ggml_sched_overlap * ov, const ggml_tensor * node, int split_id);

// The split that is to be launched has a mark: the next one's inputs can be fetched first.
bool ggml_sched_overlap_wants(const ggml_sched_overlap * ov, int split_id);
// One of those inputs, its copy, and where it is.
void ggml_sched_overlap_input(ggml_sched_overlap * ov, ggml_tensor * input, ggml_tensor * input_cpy, ggml_backend_t backend);
// Fetches them, if split next_id is the host's and graph, of the split before it, produces none of them.
void ggml_sched_overlap_fetch(ggml_sched_overlap * ov, ggml_sched_prof * prof, const ggml_cgraph * graph, int next_id,
                              ggml_backend_t next_backend);
// Split split_id was launched: if it has a mark, nothing of it may still be on its way to the device when the host begins.
void ggml_sched_overlap_launched(const ggml_sched_overlap * ov, int split_id, ggml_backend_t backend);
// Whether the inputs of split_id are there already; it is about to use them. Before a split of the host all that was sent
// from its memory has left.
bool ggml_sched_overlap_take(ggml_sched_overlap * ov, int split_id, ggml_backend_t backend);
// The split behind the host's: sends the host's result in the order of the device's queue. false: not this one
bool ggml_sched_overlap_send(ggml_sched_overlap * ov, int split_id, ggml_backend_t input_backend, ggml_backend_t backend,
                             const ggml_tensor * input, ggml_tensor * input_cpy);
