// SPDX-License-Identifier: MIT

// Plays a recorded routing trace through llama_expert_policy and prints what it hit, as JSON.
//
//   llama-expert-policy-sim TRACE --slots N [--policy score|lru] [options below]
//
// Each token is a step; its experts are looked up in what is there before it. What is planned after step n is there for step
// n + delay. The trace's format is described in llamafork/trace/format.py.

#include "llama-expert-policy.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <string>

using json = nlohmann::ordered_json;

struct sim_trace {
    int32_t n_expert = 0;
    int32_t n_used   = 0;
    int32_t n_layer  = 0;
    int64_t n_token  = 0;
    std::vector<int32_t> layers;
    std::vector<int32_t> ids; // [n_token][n_layer][n_used]

    const int32_t * at(int64_t token, int32_t layer) const { return ids.data() + (token*n_layer + layer)*n_used; }
};

struct sim_options {
    llama_expert_policy_params policy;
    int64_t  slots     = 0;
    int64_t  skip      = 64;   // tokens that are played and not counted
    int64_t  delay     = 1;    // steps from plan to there
    int64_t  bytes     = 1;    // of an expert
    int64_t  step_us   = 0;    // time of a step and of an upload, told to the policy
    int64_t  upload_us = 0;
    bool     all       = false; // the prompt's tokens too
};

static bool load(const char * path, bool all, sim_trace & out, std::string & why) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<uint8_t> data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (data.size() < 12 || memcmp(data.data(), "LFTRACE1", 8) != 0) {
        why = "it is not a routing trace";
        return false;
    }
    const size_t length = data[8] | data[9] << 8 | data[10] << 16 | (size_t) data[11] << 24;
    if (length > data.size() - 12) {
        why = "its header is cut off";
        return false;
    }
    const json head = json::parse(data.begin() + 12, data.begin() + 12 + length, nullptr, false);
    size_t width = 0;
    try {
        out.n_expert = head.at("n_expert");
        out.n_used   = head.at("n_used");
        out.layers   = head.at("layers").get<std::vector<int32_t>>();
        width        = head.at("width");
    } catch (const json::exception &) {
        width = 0;
    }
    out.n_layer = (int32_t) out.layers.size();
    if (width < 1 || width > 2 || out.n_used < 1 || out.n_used > out.n_expert || out.n_layer < 1) {
        why = "its header is damaged";
        return false;
    }
    const size_t row = (size_t) out.n_layer*out.n_used;
    for (size_t at = 12 + length; at + 5 + row*width <= data.size(); at += 5 + row*width) {
        if (!all && data[at + 4] == 0) {
            continue;
        }
        for (size_t i = 0; i < row; i++) {
            const uint8_t * id = data.data() + at + 5 + i*width;
            out.ids.push_back(id[0] | (width == 2 ? id[1] << 8 : 0));
            if (out.ids.back() >= out.n_expert) {
                why = "it names experts that are not there";
                return false;
            }
        }
        out.n_token++;
    }
    return true;
}

static json play(const sim_trace & t, const sim_options & o) {
    const std::vector<llama_expert_policy::layer> shape(t.n_layer, { t.n_expert, (int32_t) o.slots, (uint64_t) o.bytes });
    llama_expert_policy policy(o.policy, shape);
    std::deque<std::vector<llama_expert_policy::swap>> flying;
    std::vector<int64_t> hits(t.n_layer), uploads(t.n_layer);
    std::chrono::steady_clock::duration spent{};
    for (int64_t i = 0; i < t.n_token; i++) {
        while ((int64_t) flying.size() >= o.delay) {
            for (const auto & s : flying.front()) {
                policy.landed(s);
                policy.time_upload(o.upload_us > 0 ? o.bytes : 0, o.upload_us);
            }
            flying.pop_front();
        }
        const bool counted = i >= o.skip;
        for (int32_t l = 0; l < t.n_layer && counted; l++) {
            for (int32_t k = 0; k < t.n_used; k++) {
                hits[l] += policy.slot(l, t.at(i, l)[k]) >= 0;
            }
        }
        policy.time_step(o.step_us);
        const auto start = std::chrono::steady_clock::now();
        for (int32_t l = 0; l < t.n_layer; l++) {
            policy.use(l, t.at(i, l), t.n_used);
        }
        policy.step(1);
        flying.push_back(policy.plan());
        spent += std::chrono::steady_clock::now() - start;
        for (const auto & s : flying.back()) {
            uploads[s.layer] += counted;
        }
    }
    const int64_t lookups = std::max<int64_t>(0, t.n_token - o.skip)*t.n_used;
    json out = { { "policy", o.policy.type == llama_expert_policy_params::LRU ? "lru" : "score" }, { "slots", o.slots },
        { "delay", o.delay }, { "tokens", t.n_token }, { "lookups", lookups*t.n_layer }, { "hits", 0 }, { "uploads", 0 }, { "bytes", 0 } };
    int64_t all_hits = 0, all_uploads = 0;
    json layers = json::array();
    for (int32_t l = 0; l < t.n_layer; l++) {
        layers.push_back({ { "layer", t.layers[l] }, { "lookups", lookups }, { "hits", hits[l] }, { "uploads", uploads[l] } });
        all_hits    += hits[l];
        all_uploads += uploads[l];
    }
    out["hits"]        = all_hits;
    out["uploads"]     = all_uploads;
    out["bytes"]       = all_uploads*o.bytes;
    out["us_per_step"] = t.n_token > 0 ? std::chrono::duration<double, std::micro>(spent).count()/t.n_token : 0.0;
    out["layers"]      = layers;
    return out;
}

static int usage(const char * self, const char * why) {
    fprintf(stderr, "%s\n", why);
    fprintf(stderr,
        "usage: %s TRACE --slots N [--policy score|lru] [--skip TOKENS] [--delay STEPS] [--all]\n"
        "       [--budget UPLOADS] [--step-us US --upload-us US] [--bytes N] [--window TOKENS] [--margin USES] [--dwell TOKENS]\n"
        "       [--earn HITS] [--sticky SHARE] [--swap-frac SHARE] [--deterministic]\n", self);
    return 1;
}

int main(int argc, char ** argv) {
    sim_options o;
    o.policy.budget = INT32_MAX; // unless times are given
    bool budget = false;
    if (argc < 2) {
        return usage(argv[0], "no trace given");
    }
    for (int i = 2; i < argc; i++) {
        const std::string name = argv[i];
        if (name == "--all") {
            o.all = true;
            continue;
        }
        if (name == "--deterministic") {
            o.policy.deterministic = true;
            continue;
        }
        if (++i == argc) {
            return usage(argv[0], (name + " needs a value").c_str());
        }
        const std::string word = argv[i];
        if (name == "--policy") {
            if (word != "score" && word != "lru") {
                return usage(argv[0], ("no policy " + word).c_str());
            }
            o.policy.type = word == "lru" ? llama_expert_policy_params::LRU : llama_expert_policy_params::SCORE;
            continue;
        }
        char * end = nullptr;
        const double value = strtod(word.c_str(), &end);
        if (end == word.c_str() || *end != 0 || !(value >= 0 && value <= 1e15)) {
            return usage(argv[0], (name + " " + word + " is no number").c_str());
        }
        const int32_t whole = (int32_t) std::min(value, (double) INT32_MAX);
        if      (name == "--slots")     { o.slots            = whole; }
        else if (name == "--skip")      { o.skip             = whole; }
        else if (name == "--delay")     { o.delay            = whole; }
        else if (name == "--bytes")     { o.bytes            = (int64_t) value; }
        else if (name == "--step-us")   { o.step_us          = whole; }
        else if (name == "--upload-us") { o.upload_us        = whole; }
        else if (name == "--budget")    { o.policy.budget    = whole; budget = true; }
        else if (name == "--window")    { o.policy.window    = whole; }
        else if (name == "--margin")    { o.policy.margin    = (float) value; }
        else if (name == "--dwell")     { o.policy.dwell     = whole; }
        else if (name == "--earn")      { o.policy.earn      = (float) value; }
        else if (name == "--sticky")    { o.policy.sticky    = (float) value; }
        else if (name == "--swap-frac") { o.policy.swap_frac = (float) value; }
        else { return usage(argv[0], ("no option " + name).c_str()); }
    }
    sim_trace trace;
    std::string why;
    if (!load(argv[1], o.all, trace, why)) {
        fprintf(stderr, "cannot read %s: %s\n", argv[1], why.c_str());
        return 1;
    }
    if (o.slots < 1 || o.slots > trace.n_expert || o.delay < 1) {
        return usage(argv[0], "--slots needs 1 to the number of experts, --delay at least 1");
    }
    if (!budget && o.step_us > 0 && o.upload_us > 0) {
        o.policy.budget = 0;
    }
    printf("%s\n", play(trace, o).dump().c_str());
    return 0;
}
