// SPDX-License-Identifier: MIT

#include "sim-host.h"

#include "sim-time.h"

#include <cstdlib>

static thread_local bool    device_thread = false;
static thread_local int64_t overslept_ns  = 0; // sleeps end late; the next one is shorter by that

static double read_slow() {
    const char * text = std::getenv("GGML_SIM_HOST_SLOW");
    if (!text || !*text) {
        return 1.0;
    }
    char * end = nullptr;
    const double k = std::strtod(text, &end);
    if (*end || !(k >= 1.0) || k > 1000.0) {
        GGML_ABORT("GGML_SIM_HOST_SLOW: '%s' is not a factor from 1 to 1000", text);
    }
    return k;
}

static double slow() {
    static const double k = read_slow();
    return k;
}

struct ggml_sim_host_hook * ggml_sim_host(void) {
    static ggml_sim_host_hook hook = {};
    return &hook;
}

void ggml_sim_host_set_device_thread(void) {
    device_thread = true;
}

int64_t ggml_sim_host_begin(const struct ggml_cgraph * graph) {
    if (device_thread) {
        return 0;
    }
    if (ggml_sim_host()->begin) {
        ggml_sim_host()->begin(graph);
    }
    return slow() > 1.0 ? sim_now_ns() : 0;
}

void ggml_sim_host_end(int64_t begin_ns) {
    if (begin_ns == 0) {
        return;
    }
    const int64_t now = sim_now_ns();
    const int64_t end = now + (int64_t) ((slow() - 1.0)*(double) (now - begin_ns)) - overslept_ns;
    sim_sleep_until(end);
    overslept_ns = sim_now_ns() - end;
}
