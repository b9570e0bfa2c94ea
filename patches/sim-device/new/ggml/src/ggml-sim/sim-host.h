// SPDX-License-Identifier: MIT
#pragma once

// Compiled into ggml-base in GGML_SIM builds: what the CPU backend tells the simulation about the graphs it runs.

#include "ggml.h"

#include <cstdint>

struct ggml_cgraph;

struct ggml_sim_host_hook {
    void (*begin)(const struct ggml_cgraph * graph); // set by ggml-sim when it looks for races
};

GGML_API struct ggml_sim_host_hook * ggml_sim_host(void);

// A thread that computes for a device is not the host.
GGML_API void ggml_sim_host_set_device_thread(void);

// Around each graph of the CPU backend. GGML_SIM_HOST_SLOW=k makes it take k times as long, by sleeping: a device with
// the speed of this CPU is then k times faster than the host, and the cores are free for it meanwhile.
GGML_API int64_t ggml_sim_host_begin(const struct ggml_cgraph * graph); // when it began (ns), 0 if it is not to be slowed
GGML_API void    ggml_sim_host_end  (int64_t begin_ns);

struct ggml_sim_host_scope {
    explicit ggml_sim_host_scope(const struct ggml_cgraph * graph) : begin_ns(ggml_sim_host_begin(graph)) {}
    ~ggml_sim_host_scope() { ggml_sim_host_end(begin_ns); }

    const int64_t begin_ns;
};
