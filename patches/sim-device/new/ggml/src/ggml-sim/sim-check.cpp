// SPDX-License-Identifier: MIT

#include "sim-check.h"

#include "sim-config.h"

#include "ggml.h"

#include <algorithm>
#include <mutex>

namespace {

struct live_access {
    sim_access  access;
    int         stream;
    uint64_t    op;     // the op's number in its queue
    sim_clock   clock;  // what it knew to be over when it was queued
    const char * what;
};

struct host_access {
    sim_access   access;
    const char * what;
};

struct pending_op { // queued, with accesses still to come
    int       stream;
    uint64_t  op;
    sim_clock clock;
    std::vector<sim_access>  within;
    std::vector<host_access> host; // what the host did there since, not knowing the op to be over
};

struct checker {
    std::mutex               mutex;
    std::vector<sim_clock>   streams; // streams[s][s] is the number of operations queued on s
    std::vector<std::string> names;
    sim_clock                host;
    std::vector<live_access> live;
    std::vector<pending_op>  pending;
};

checker & state() {
    static checker * c = new checker; // outlives all threads
    return *c;
}

uint64_t at(const sim_clock & clock, int stream) {
    return (size_t) stream < clock.size() ? clock[stream] : 0;
}

void join(sim_clock & clock, const sim_clock & other) {
    clock.resize(std::max(clock.size(), other.size()));
    for (size_t i = 0; i < other.size(); i++) {
        clock[i] = std::max(clock[i], other[i]);
    }
}

void set_at(sim_clock & clock, int stream, uint64_t value) {
    clock.resize(std::max(clock.size(), (size_t) stream + 1));
    clock[stream] = std::max(clock[stream], value);
}

bool overlap(const sim_access & a, const sim_access & b) {
    return a.begin < b.begin + b.size && b.begin < a.begin + a.size;
}

[[noreturn]] void race(const char * what, const sim_access & now, const std::string & where, const char * then_what,
                       const sim_access & then, const std::string & then_where) {
    GGML_ABORT("sim: race: %s %s %s %s, while '%s' on %s still %s %s; nothing orders the two",
        what, now.write ? "writes" : "reads", now.name.c_str(), where.c_str(),
        then_what, then_where.c_str(), then.write ? "writes" : "reads", then.name.c_str());
}

const std::string HOST = "from the host";

// Ends the program if one of *accesses* meets a live one that *clock* does not know to be over, and that does not know
// operation *op* to be over: a late access may be compared with what was queued after it.
void compare(const checker & c, const char * what, const std::vector<sim_access> & accesses, int stream, uint64_t op,
             const sim_clock & clock) {
    for (const auto & then : c.live) {
        if (then.stream == stream || at(clock, then.stream) >= then.op || (stream >= 0 && at(then.clock, stream) >= op)) {
            continue;
        }
        for (const auto & now : accesses) {
            if ((now.write || then.access.write) && overlap(now, then.access)) {
                race(what, now, stream < 0 ? HOST : "on " + c.names[stream], then.what, then.access, c.names[then.stream]);
            }
        }
    }
}

// An access can go once the host knows it is over and no queued operation that may still name more could clash with it.
void prune(checker & c) {
    const auto over = [&](const live_access & a) {
        if (at(c.host, a.stream) < a.op) {
            return false;
        }
        for (const auto & p : c.pending) {
            if (p.stream != a.stream && at(p.clock, a.stream) < a.op && at(a.clock, p.stream) < p.op) {
                return false;
            }
        }
        return true;
    };
    c.live.erase(std::remove_if(c.live.begin(), c.live.end(), over), c.live.end());
}

} // namespace

#define CHECKED_OR(value) if (!sim_get_config().check) { return value; } checker & c = state(); std::lock_guard<std::mutex> lock(c.mutex)

int sim_check_new_stream(const std::string & device) {
    checker & c = state();
    std::lock_guard<std::mutex> lock(c.mutex);
    const int id = (int) c.streams.size();
    c.streams.emplace_back();
    c.names.push_back(device + " queue " + std::to_string(id));
    return id;
}

void sim_check_free_stream(int stream) {
    CHECKED_OR();
    set_at(c.host, stream, at(c.streams[stream], stream));
    prune(c);
}

sim_clock sim_check_stream_clock(int stream) {
    CHECKED_OR({});
    return c.streams[stream];
}

void sim_check_stream_joins(int stream, const sim_clock & clock) {
    CHECKED_OR();
    join(c.streams[stream], clock);
}

void sim_check_host_joins(const sim_clock & clock) {
    CHECKED_OR();
    join(c.host, clock);
    prune(c);
}

uint64_t sim_check_queue(int stream, const char * what, const std::vector<sim_access> & accesses,
                         const std::vector<sim_access> & within) {
    CHECKED_OR(0);
    auto & clock = c.streams[stream];
    join(clock, c.host);
    const uint64_t op = at(clock, stream) + 1;
    set_at(clock, stream, op);
    compare(c, what, accesses, stream, op, clock);
    for (const auto & access : accesses) {
        c.live.push_back({ access, stream, op, clock, what });
    }
    if (!within.empty()) {
        c.pending.push_back({ stream, op, clock, within, {} });
    }
    return op;
}

void sim_check_late(int stream, uint64_t handle, const char * what, const std::vector<sim_access> & accesses) {
    CHECKED_OR();
    for (const auto & p : c.pending) {
        if (p.stream == stream && p.op == handle) {
            compare(c, what, accesses, stream, handle, p.clock);
            for (const auto & access : accesses) {
                for (const auto & then : p.host) {
                    if (then.access.write && overlap(access, then.access)) {
                        race(then.what, then.access, HOST, what, access, c.names[stream]);
                    }
                }
                c.live.push_back({ access, stream, handle, p.clock, what });
            }
            return;
        }
    }
}

void sim_check_ran(int stream, uint64_t handle) {
    CHECKED_OR();
    const auto same = [&](const pending_op & p) { return p.stream == stream && p.op == handle; };
    c.pending.erase(std::remove_if(c.pending.begin(), c.pending.end(), same), c.pending.end());
    prune(c);
}

void sim_check_host(const char * what, const std::vector<sim_access> & accesses) {
    CHECKED_OR();
    compare(c, what, accesses, -1, 0, c.host);
    for (auto & p : c.pending) {
        if (at(c.host, p.stream) >= p.op) {
            continue;
        }
        for (const auto & access : accesses) {
            const auto meets = [&](const sim_access & part) { return overlap(access, part); };
            if (access.write && std::any_of(p.within.begin(), p.within.end(), meets)) {
                p.host.push_back({ access, what });
            }
        }
    }
}
