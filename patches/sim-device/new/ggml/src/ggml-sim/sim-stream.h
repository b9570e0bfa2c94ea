// SPDX-License-Identifier: MIT
#pragma once

#include "sim-check.h"
#include "sim-memory.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

// A mark in a queue. Done when the work queued before it is.
struct sim_ticket {
    std::atomic<bool> done{false};
    sim_clock         clock; // what is known to be over once this is
};

// One queue and its worker: tasks run in the order in which they were pushed. Owned by one backend instance.
class sim_stream {
public:
    explicit sim_stream(sim_device * dev);
    ~sim_stream(); // runs what is queued, then ends the worker

    void push(std::function<void()> task);
    void drain();       // the host waits until all that was pushed is done
    void synchronize(); // and relies on it

    std::shared_ptr<sim_ticket> record();
    void wait(const std::shared_ptr<sim_ticket> & ticket); // later tasks wait for it
    static void synchronize_device(sim_device * dev);       // all its queues
    static void drain_device(sim_device * dev);             // nullptr: those of all devices
    static void host_wait(const std::shared_ptr<sim_ticket> & ticket, sim_device * dev);

    sim_device * device() const { return dev; }
    int          id()     const { return check_id; }

private:
    void run();
    bool take(std::function<void()> & task);

    sim_device * dev;
    int          check_id;

    std::mutex                        mutex;
    std::condition_variable           wake;
    std::condition_variable           finished;
    std::deque<std::function<void()>> queue;
    bool                              stop = false;
    int64_t                           waited_ns = 0; // of the task that runs, for an event; the worker's own
    std::atomic<uint64_t>             pushed{0};
    std::atomic<uint64_t>             done{0};
    std::thread                       worker;
};

enum sim_direction { SIM_H2D_PINNED, SIM_H2D_PAGEABLE, SIM_D2H, SIM_D2D };

// Reserves the link, calls copy(), and returns no sooner than the link would have moved the bytes.
void sim_transfer(sim_device * dev, sim_direction direction, size_t bytes, const std::function<void()> & copy);
