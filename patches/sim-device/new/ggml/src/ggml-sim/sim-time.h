// SPDX-License-Identifier: MIT
#pragma once

#include <cerrno>
#include <cstdint>
#include <ctime>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sched.h>

static inline int64_t sim_now_ns() {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t) ts.tv_sec*1000000000 + ts.tv_nsec;
}

// Sleeps most of the time and spins the rest: precise to some microseconds without holding a core.
static inline void sim_sleep_until(int64_t at_ns) {
#ifdef __linux__
    static thread_local bool precise = false;
    if (!precise) {
        prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
        precise = true;
    }
#endif
    const int64_t spin_ns = 20*1000;
    for (;;) {
        const int64_t left = at_ns - sim_now_ns();
        if (left <= 0) {
            return;
        }
        if (left > spin_ns) {
            const int64_t sleep_ns = left - spin_ns;
            const struct timespec ts = { (time_t) (sleep_ns/1000000000), (long) (sleep_ns%1000000000) };
            nanosleep(&ts, nullptr);
        }
    }
}
