// SPDX-License-Identifier: MIT

#include "sim-stats.h"

#include "sim-memory.h"

#include <cinttypes>
#include <cstdio>

static void write_device(FILE * out, const sim_device & d) {
    const auto & c = d.count;
    fprintf(out,
        "{\"name\": \"%s\", \"mem\": %zu, \"alloc_bytes\": %" PRIu64 ", \"alloc_peak\": %" PRIu64 ", \"alloc_failed\": %" PRIu64
        ", \"buffers\": %" PRIu64 ", \"h2d_bytes\": %" PRIu64 ", \"h2d_copies\": %" PRIu64 ", \"h2d_pinned_bytes\": %" PRIu64
        ", \"d2h_bytes\": %" PRIu64 ", \"d2h_copies\": %" PRIu64 ", \"d2d_bytes\": %" PRIu64 ", \"d2d_copies\": %" PRIu64
        ", \"blocking_copies\": %" PRIu64 ", \"graphs\": %" PRIu64 ", \"nodes\": %" PRIu64 ", \"host_waits\": %" PRIu64
        ", \"host_wait_us\": %" PRIu64 ", \"queue_waits\": %" PRIu64 ", \"queue_wait_us\": %" PRIu64 ", \"busy_us\": %" PRIu64 ", \"idle_us\": %" PRIu64 "}",
        d.name.c_str(), d.cfg.mem, c.alloc_bytes.load(), c.alloc_peak.load(), c.alloc_failed.load(),
        c.buffers.load(), c.h2d_bytes.load(), c.h2d_copies.load(), c.h2d_pinned_bytes.load(),
        c.d2h_bytes.load(), c.d2h_copies.load(), c.d2d_bytes.load(), c.d2d_copies.load(),
        c.blocking_copies.load(), c.graphs.load(), c.nodes.load(), c.host_waits.load(),
        c.host_wait_ns.load()/1000, c.queue_waits.load(), c.queue_wait_ns.load()/1000, c.busy_ns.load()/1000, c.idle_ns.load()/1000);
}

void sim_write_stats() {
    const std::string & where = sim_get_config().stats;
    FILE * out = where == "-" ? stderr : fopen(where.c_str(), "w");
    if (!out) {
        fprintf(stderr, "sim: cannot write %s\n", where.c_str());
        return;
    }
    fprintf(out, "{\"sim\": [");
    for (size_t i = 0; i < sim_n_devices(); i++) {
        fprintf(out, "%s", i ? ", " : "");
        write_device(out, *sim_get_device(i));
    }
    fprintf(out, "]}\n");
    if (out != stderr) {
        fclose(out);
    }
}
