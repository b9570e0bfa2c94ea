// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// One simulated device. Rates are bytes per second; 0 means as fast as memcpy.
struct sim_device_config {
    size_t  mem          = 1024ull << 20;
    size_t  max_alloc    = 0; // 0: no limit but the memory
    double  pinned_h2d   = 0;
    double  pageable_h2d = 0;
    double  d2h          = 0;
    double  d2d          = 0;
    int64_t lat_ns       = 0;
    int     threads      = 1;
};

// What the environment says; read once. An error in it ends the program with the word that is wrong.
struct sim_config {
    std::vector<sim_device_config> devices;   // GGML_SIM_DEVICES
    bool        check       = false;          // GGML_SIM_CHECK: find races
    bool        fill_nan    = true;           // GGML_SIM_FILL = nan | zero: fresh device memory
    size_t      pin_limit   = SIZE_MAX;       // GGML_SIM_PIN: bytes of page-locked memory there are
    int64_t     spin_ns     = 200*1000;       // GGML_SIM_SPIN_US: how long a wait spins before it sleeps
    std::string stats;                        // GGML_SIM_STATS: file for the counters, "-" for stderr
    int64_t     offload_min_batch = 32;       // GGML_OP_OFFLOAD_MIN_BATCH, as for CUDA
};

const sim_config & sim_get_config();

// Pure parsers, false when the text is wrong; *bad then holds the word.
bool sim_parse_devices(const std::string & text, std::vector<sim_device_config> & out, std::string & bad);
bool sim_parse_size   (const std::string & text, size_t  & bytes);        // 64M, 1G: binary
bool sim_parse_rate   (const std::string & text, double  & bytes_per_s);  // 12G, 800M: decimal
bool sim_parse_time   (const std::string & text, int64_t & ns);           // 10us, 1ms, 500ns
