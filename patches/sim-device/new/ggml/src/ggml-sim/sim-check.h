// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Finds races between queues, and between a queue and the host, by what is *ordered*, not by what happened to overlap:
// every queue carries a vector clock; launches take over what the host has waited for, events carry clocks over to other
// queues. Two accesses that share bytes, one of them a write, with neither known to be over when the other was queued,
// end the program with both names. Off (GGML_SIM_CHECK unset) all of this costs one test.
//
// All host threads count as one: a wait of one of them orders for all. Races between host threads are ThreadSanitizer's.

typedef std::vector<uint64_t> sim_clock; // per queue: how many of its operations are known to be over

struct sim_access {
    const uint8_t * begin;
    size_t          size;
    bool            write;
    std::string     name;
};

int       sim_check_new_stream (const std::string & device);
void      sim_check_free_stream(int stream);

sim_clock sim_check_stream_clock(int stream);
void      sim_check_stream_joins(int stream, const sim_clock & clock);
void      sim_check_host_joins  (const sim_clock & clock);

// An operation is queued. *within* are the ranges of which it reads some part that is known only when it runs (the banks
// of MUL_MAT_ID). Returns its handle for those.
uint64_t  sim_check_queue(int stream, const char * what, const std::vector<sim_access> & accesses,
                          const std::vector<sim_access> & within = {});
void      sim_check_late (int stream, uint64_t handle, const char * what, const std::vector<sim_access> & accesses);
void      sim_check_ran  (int stream, uint64_t handle);

// The host does something at once: a blocking copy, a CPU graph, freeing a buffer.
void      sim_check_host(const char * what, const std::vector<sim_access> & accesses);
