// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstdint>

// Counters of one device, for the life of the program.
struct sim_counters {
    std::atomic<uint64_t> h2d_bytes{0},      h2d_copies{0};
    std::atomic<uint64_t> h2d_pinned_bytes{0};
    std::atomic<uint64_t> d2h_bytes{0},      d2h_copies{0};
    std::atomic<uint64_t> d2d_bytes{0},      d2d_copies{0};
    std::atomic<uint64_t> graphs{0},         nodes{0};
    std::atomic<uint64_t> host_waits{0},     host_wait_ns{0}; // the host waited for the device
    std::atomic<uint64_t> queue_waits{0},    queue_wait_ns{0}; // one of its queues waited for an event
    std::atomic<uint64_t> blocking_copies{0};
    std::atomic<uint64_t> busy_ns{0},        idle_ns{0};      // of the queues; idle between the first and the last task, waits included
    std::atomic<uint64_t> alloc_bytes{0},    alloc_peak{0},   alloc_failed{0}, buffers{0};
};

// GGML_SIM_STATS: the counters of all devices as one line of JSON
void sim_write_stats();
