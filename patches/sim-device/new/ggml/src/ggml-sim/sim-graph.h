// SPDX-License-Identifier: MIT
#pragma once

#include "sim-check.h"
#include "sim-memory.h"

#include "ggml-impl.h"

#include <deque>
#include <unordered_map>
#include <vector>

// A copy of a graph, made at launch: whoever launched it may rebuild or free the tensors before it has run, as with the
// kernel arguments of a real device. The copies hold real addresses.
class sim_graph {
public:
    sim_graph(const ggml_cgraph * src, sim_device * dev);
    ~sim_graph();

    sim_graph(const sim_graph &) = delete;
    sim_graph & operator=(const sim_graph &) = delete;

    // Runs on the queue's worker. *handle* is that of the queued operation.
    ggml_status compute(ggml_backend_t cpu, int stream, uint64_t handle);

    const ggml_cgraph * get() const { return &graph; }
    std::vector<sim_access> banks() const; // the tensors of which a MUL_MAT_ID reads some experts
    int  n_nodes() const { return graph.n_nodes; }

private:
    ggml_tensor * copy_of(const ggml_tensor * t);
    void require_here(const ggml_tensor * t) const; // ends the program if the device cannot reach it

    ggml_cgraph                graph = {};
    std::deque<ggml_tensor>    tensors;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies;
    std::vector<ggml_tensor *> nodes;
    std::vector<int>           experts; // positions of the MUL_MAT_ID nodes
    std::vector<int32_t>       use_counts;
    sim_device               * dev;
};

// what a graph reads and writes; with_experts false leaves the expert tensors of MUL_MAT_ID out
std::vector<sim_access> sim_graph_accesses(const ggml_cgraph * graph, bool with_experts);
