// SPDX-License-Identifier: MIT

#include "sim-stream.h"

#include "sim-time.h"

#include <algorithm>
#include <vector>

// Spins on a condition, then yields; true as soon as it holds, false when the time is over.
template <typename F>
static bool spin_for(int64_t ns, const F & holds) {
    if (holds()) {
        return true;
    }
    const int64_t end = sim_now_ns() + ns;
    do {
        for (int i = 0; i < 32; i++) {
            if (holds()) {
                return true;
            }
        }
        sched_yield();
    } while (sim_now_ns() < end);
    return holds();
}

// Spins once, then naps.
template <typename F>
static void wait_until(const F & holds) {
    if (spin_for(sim_get_config().spin_ns, holds)) {
        return;
    }
    while (!holds()) {
        sim_sleep_until(sim_now_ns() + 50*1000);
    }
}

namespace {

struct stream_list {
    std::mutex                mutex;
    std::vector<sim_stream *> streams;
};

stream_list & all() {
    static stream_list * list = new stream_list;
    return *list;
}

} // namespace

sim_stream::sim_stream(sim_device * dev) : dev(dev), check_id(sim_check_new_stream(dev->name)) {
    worker = std::thread([this] { run(); });
    std::lock_guard<std::mutex> lock(all().mutex);
    all().streams.push_back(this);
}

sim_stream::~sim_stream() {
    {
        std::lock_guard<std::mutex> lock(all().mutex);
        auto & streams = all().streams;
        streams.erase(std::find(streams.begin(), streams.end(), this));
    }
    synchronize();
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    wake.notify_one();
    worker.join();
    sim_check_free_stream(check_id);
}

void sim_stream::push(std::function<void()> task) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(std::move(task));
        pushed.fetch_add(1, std::memory_order_release);
    }
    wake.notify_one();
}

void sim_stream::drain() {
    const uint64_t target = pushed.load(std::memory_order_acquire);
    if (done.load(std::memory_order_acquire) < target) {
        const int64_t start = sim_now_ns();
        const auto reached = [&] { return done.load(std::memory_order_acquire) >= target; };
        if (!spin_for(sim_get_config().spin_ns, reached)) {
            std::unique_lock<std::mutex> lock(mutex);
            finished.wait(lock, reached);
        }
        dev->count.host_waits++;
        dev->count.host_wait_ns += sim_now_ns() - start;
    }
}

void sim_stream::synchronize() {
    const sim_clock clock = sim_check_stream_clock(check_id);
    drain();
    sim_check_host_joins(clock);
}

void sim_stream::drain_device(sim_device * dev) {
    std::lock_guard<std::mutex> lock(all().mutex);
    for (sim_stream * stream : all().streams) {
        if (dev == nullptr || stream->dev == dev) {
            stream->drain();
        }
    }
}

void sim_stream::synchronize_device(sim_device * dev) {
    std::lock_guard<std::mutex> lock(all().mutex);
    for (sim_stream * stream : all().streams) {
        if (stream->dev == dev) {
            stream->synchronize();
        }
    }
}

std::shared_ptr<sim_ticket> sim_stream::record() {
    auto ticket = std::make_shared<sim_ticket>();
    ticket->clock = sim_check_stream_clock(check_id);
    push([ticket] { ticket->done.store(true, std::memory_order_release); });
    return ticket;
}

void sim_stream::wait(const std::shared_ptr<sim_ticket> & ticket) {
    sim_check_stream_joins(check_id, ticket->clock);
    push([this, ticket] {
        const auto reached = [&] { return ticket->done.load(std::memory_order_acquire); };
        if (reached()) {
            return;
        }
        const int64_t start = sim_now_ns();
        wait_until(reached);
        waited_ns = sim_now_ns() - start;
        dev->count.queue_waits++;
        dev->count.queue_wait_ns += waited_ns;
    });
}

void sim_stream::host_wait(const std::shared_ptr<sim_ticket> & ticket, sim_device * dev) {
    const auto reached = [&] { return ticket->done.load(std::memory_order_acquire); };
    if (!reached()) {
        const int64_t start = sim_now_ns();
        wait_until(reached);
        dev->count.host_waits++;
        dev->count.host_wait_ns += sim_now_ns() - start;
    }
    sim_check_host_joins(ticket->clock);
}

bool sim_stream::take(std::function<void()> & task) {
    const uint64_t next = done.load(std::memory_order_relaxed);
    spin_for(sim_get_config().spin_ns, [&] { return pushed.load(std::memory_order_acquire) > next; });
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait(lock, [&] { return stop || !queue.empty(); });
    if (queue.empty()) {
        return false;
    }
    task = std::move(queue.front());
    queue.pop_front();
    return true;
}

void sim_stream::run() {
    std::function<void()> task;
    int64_t last = 0;
    while (take(task)) {
        const int64_t start = sim_now_ns();
        if (last != 0) {
            dev->count.idle_ns += start - last;
        }
        waited_ns = 0;
        task();
        task = nullptr;
        last = sim_now_ns();
        dev->count.busy_ns += last - start - waited_ns;
        dev->count.idle_ns += waited_ns;
        {
            std::lock_guard<std::mutex> lock(mutex);
            done.fetch_add(1, std::memory_order_release);
        }
        finished.notify_all();
    }
}

static double rate_of(const sim_device_config & cfg, sim_direction direction) {
    switch (direction) {
        case SIM_H2D_PINNED:   return cfg.pinned_h2d;
        case SIM_H2D_PAGEABLE: return cfg.pageable_h2d;
        case SIM_D2H:          return cfg.d2h;
        default:               return cfg.d2d;
    }
}

void sim_transfer(sim_device * dev, sim_direction direction, size_t bytes, const std::function<void()> & copy) {
    const double  rate = rate_of(dev->cfg, direction);
    const int64_t need = rate > 0 ? (int64_t) ((double) bytes/rate*1e9) : 0;
    int64_t ready;
    {
        std::lock_guard<std::mutex> lock(dev->mutex);
        int64_t & free_at = direction == SIM_D2H ? dev->d2h_free_at : direction == SIM_D2D ? dev->d2d_free_at : dev->h2d_free_at;
        const int64_t begin = std::max(sim_now_ns(), free_at);
        free_at = begin + need;
        ready   = begin + need + dev->cfg.lat_ns;
    }
    copy();
    if (need > 0 || dev->cfg.lat_ns > 0) {
        sim_sleep_until(ready);
    }
    auto & c = dev->count;
    switch (direction) {
        case SIM_H2D_PINNED:
            c.h2d_pinned_bytes += bytes;
            // fall through
        case SIM_H2D_PAGEABLE: c.h2d_bytes += bytes; c.h2d_copies++; break;
        case SIM_D2H:          c.d2h_bytes += bytes; c.d2h_copies++; break;
        default:               c.d2d_bytes += bytes; c.d2d_copies++; break;
    }
}
