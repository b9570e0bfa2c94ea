// SPDX-License-Identifier: MIT

#include "sim-config.h"

#include "ggml.h"

#include <cmath>
#include <cstdlib>

static bool split_number(const std::string & text, double & value, std::string & unit) {
    char * end = nullptr;
    value = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || !std::isfinite(value) || value < 0) {
        return false;
    }
    unit = end;
    return true;
}

bool sim_parse_size(const std::string & text, size_t & bytes) {
    double value = 0;
    std::string unit;
    if (!split_number(text, value, unit)) {
        return false;
    }
    const double scale = unit == "" ? 1.0 : unit == "K" ? 1024.0 : unit == "M" ? 1048576.0 : unit == "G" ? 1073741824.0 : -1.0;
    if (scale < 0 || value*scale >= 9e18) {
        return false;
    }
    bytes = (size_t) (value*scale);
    return true;
}

bool sim_parse_rate(const std::string & text, double & bytes_per_s) {
    double value = 0;
    std::string unit;
    if (!split_number(text, value, unit)) {
        return false;
    }
    const double scale = unit == "" ? 1.0 : unit == "K" ? 1e3 : unit == "M" ? 1e6 : unit == "G" ? 1e9 : -1.0;
    if (scale < 0) {
        return false;
    }
    bytes_per_s = value*scale;
    return true;
}

bool sim_parse_time(const std::string & text, int64_t & ns) {
    double value = 0;
    std::string unit;
    if (!split_number(text, value, unit)) {
        return false;
    }
    const double scale = unit == "ns" ? 1.0 : unit == "us" ? 1e3 : unit == "ms" ? 1e6 : unit == "s" ? 1e9 : -1.0;
    if (scale < 0 || value*scale > 6e10) {
        return false;
    }
    ns = (int64_t) (value*scale);
    return true;
}

static std::vector<std::string> split(const std::string & text, char at) {
    std::vector<std::string> out;
    size_t from = 0;
    while (from <= text.size()) {
        const size_t to = std::min(text.find(at, from), text.size());
        out.push_back(text.substr(from, to - from));
        from = to + 1;
    }
    return out;
}

static bool parse_setting(const std::string & word, sim_device_config & dev) {
    const size_t eq = word.find('=');
    if (eq == std::string::npos) {
        return false;
    }
    const std::string key   = word.substr(0, eq);
    const std::string value = word.substr(eq + 1);

    if (key == "mem")          { return sim_parse_size(value, dev.mem) && dev.mem > 0; }
    if (key == "max_alloc")    { return sim_parse_size(value, dev.max_alloc); }
    if (key == "h2d")          { return sim_parse_rate(value, dev.pinned_h2d) && sim_parse_rate(value, dev.pageable_h2d); }
    if (key == "pinned_h2d")   { return sim_parse_rate(value, dev.pinned_h2d); }
    if (key == "pageable_h2d") { return sim_parse_rate(value, dev.pageable_h2d); }
    if (key == "d2h")          { return sim_parse_rate(value, dev.d2h); }
    if (key == "d2d")          { return sim_parse_rate(value, dev.d2d); }
    if (key == "lat")          { return sim_parse_time(value, dev.lat_ns); }
    if (key == "threads") {
        size_t n = 0;
        if (!sim_parse_size(value, n) || n < 1 || n > 512) {
            return false;
        }
        dev.threads = (int) n;
        return true;
    }
    return false;
}

bool sim_parse_devices(const std::string & text, std::vector<sim_device_config> & out, std::string & bad) {
    out.clear();
    if (text.empty()) {
        return true;
    }
    if (text.find_first_not_of("0123456789") == std::string::npos) {
        const unsigned long n = std::strtoul(text.c_str(), nullptr, 10);
        if (n > 16) {
            bad = text;
            return false;
        }
        out.resize(n);
        return true;
    }
    for (const auto & one : split(text, ';')) {
        sim_device_config dev;
        for (const auto & word : split(one, ',')) {
            if (!parse_setting(word, dev)) {
                bad = word;
                return false;
            }
        }
        out.push_back(dev);
    }
    if (out.size() > 16) {
        bad = "more than 16 devices";
        return false;
    }
    return true;
}

static const char * env(const char * name) {
    const char * value = std::getenv(name);
    return value && *value ? value : nullptr;
}

static int64_t count_of(const char * name, const char * text) {
    char * end = nullptr;
    const int64_t value = std::strtoll(text, &end, 10);
    if (*end || value < 0) {
        GGML_ABORT("%s: '%s' is not a number", name, text);
    }
    return value;
}

static sim_config read_config() {
    sim_config c;
    std::string bad;
    if (const char * text = env("GGML_SIM_DEVICES")) {
        if (!sim_parse_devices(text, c.devices, bad)) {
            GGML_ABORT("GGML_SIM_DEVICES: '%s' is not understood; write a count, or mem=256M,h2d=2G,lat=10us;mem=128M", bad.c_str());
        }
    }
    if (const char * text = env("GGML_SIM_FILL")) {
        const std::string word = text;
        if (word != "nan" && word != "zero") {
            GGML_ABORT("GGML_SIM_FILL: '%s' is neither nan nor zero", text);
        }
        c.fill_nan = word == "nan";
    }
    if (const char * text = env("GGML_SIM_PIN")) {
        if (!sim_parse_size(text, c.pin_limit)) {
            GGML_ABORT("GGML_SIM_PIN: '%s' is not a size, such as 64M", text);
        }
    }
    if (const char * text = env("GGML_SIM_SPIN_US")) {
        c.spin_ns = count_of("GGML_SIM_SPIN_US", text)*1000;
    }
    if (const char * text = env("GGML_SIM_CHECK")) {
        c.check = std::string(text) != "0";
    }
    if (const char * text = env("GGML_SIM_STATS")) {
        c.stats = text;
    }
    if (const char * text = env("GGML_OP_OFFLOAD_MIN_BATCH")) {
        c.offload_min_batch = count_of("GGML_OP_OFFLOAD_MIN_BATCH", text);
    }
    return c;
}

const sim_config & sim_get_config() {
    static const sim_config config = read_config();
    return config;
}
