// SPDX-License-Identifier: MIT
#pragma once

#include "sim-config.h"
#include "sim-stats.h"

#include "ggml-backend-impl.h"

#include <mutex>
#include <string>

struct sim_device {
    int               index;
    std::string       name;
    std::string       description;
    sim_device_config cfg;
    sim_counters      count;

    std::mutex        mutex;          // memory accounting and the links
    int64_t           h2d_free_at = 0; // when each direction of the link is free again (ns)
    int64_t           d2h_free_at = 0;
    int64_t           d2d_free_at = 0;

    ggml_backend_device      dev;
    ggml_backend_buffer_type buft;
};

size_t       sim_n_devices();
sim_device * sim_get_device(size_t index);

// Device memory. Tensors hold addresses that no host code can read; the bytes lie elsewhere.
ggml_backend_buffer_type_i sim_buffer_type_interface();
bool         sim_buffer_is_sim(ggml_backend_buffer_t buffer);
const char * sim_name_of(const ggml_tensor * t); // its name, or its operation's
ggml_backend_buffer_t sim_buffer_of(const ggml_tensor * t); // a view's is its source's
sim_device * sim_buffer_device(ggml_backend_buffer_t buffer);
// the real address of a device address
uint8_t    * sim_real(ggml_backend_buffer_t buffer, const void * address);

// Page-locked host memory, the same for all devices.
ggml_backend_buffer_type_t sim_host_buffer_type();
bool sim_is_pinned(const void * address, size_t size);
