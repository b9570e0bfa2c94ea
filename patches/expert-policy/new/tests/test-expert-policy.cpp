// SPDX-License-Identifier: MIT

// Properties of llama_expert_policy, on made-up routing. Needs nothing but the policy.
//
//   test-expert-policy [CASE...]      (all cases by default)

#include "../src/llama-expert-policy.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <random>
#include <set>
#include <string>

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); exit(1); } } while (0)

using policy = llama_expert_policy;
using params = llama_expert_policy_params;

// topics: each has experts of its own, of which a token takes some, now and then any other
struct router {
    std::mt19937 rng;
    int n_expert, n_used, topic = 0, n_topics;
    double noise;

    router(int n_expert, int n_used, int n_topics, double noise, int seed)
        : rng(seed), n_expert(n_expert), n_used(n_used), n_topics(n_topics), noise(noise) {}

    std::vector<int32_t> token(int layer) {
        const int size = n_expert/n_topics;
        std::set<int32_t> out;
        while ((int) out.size() < n_used) {
            const bool any = n_topics == 1 || (rng() % 1000) < noise*1000;
            const int  e   = any ? rng() % n_expert : (topic*size + rng() % size);
            out.insert((e + 7*layer) % n_expert);
        }
        return std::vector<int32_t>(out.begin(), out.end());
    }
};

// a policy with a mirror of its slots, checked at every turn
struct bed {
    params p;
    std::vector<policy::layer> shape;
    policy pol;
    int delay;
    int64_t now = 0;
    double hits = 0, lookups = 0, uploads = 0;
    std::vector<std::vector<int32_t>> map;    // [layer][slot] expert, -1 free, -2 in flight
    std::vector<std::set<int32_t>>    used;   // [layer] in the last step
    std::vector<std::vector<int64_t>> since;  // [layer][slot] token of the plan
    std::deque<std::vector<policy::swap>> flying;

    bed(const params & p, const std::vector<policy::layer> & shape, int delay = 1) : p(p), shape(shape), pol(p, shape), delay(delay) {
        for (const auto & l : shape) {
            map.emplace_back(l.n_slots, -1);
            since.emplace_back(l.n_slots, 0);
        }
        used.resize(shape.size());
    }

    void check() const {
        for (size_t l = 0; l < shape.size(); l++) {
            int mapped = 0;
            for (int s = 0; s < shape[l].n_slots; s++) {
                const int32_t e = pol.expert(l, s);
                CHECK(e == (map[l][s] >= 0 ? map[l][s] : -1));
                CHECK(e < 0 || pol.slot(l, e) == s);
                mapped += e >= 0;
            }
            for (int e = 0; e < shape[l].n_expert; e++) {
                const int32_t s = pol.slot(l, e);
                CHECK(s < shape[l].n_slots);
                CHECK(s < 0 || pol.expert(l, s) == e);
                mapped -= s >= 0;
            }
            CHECK(mapped == 0);
        }
    }

    void land(bool fail = false) {
        for (const auto & s : flying.front()) {
            CHECK(pol.slot(s.layer, s.expert) == -1);
            fail ? pol.failed(s) : pol.landed(s);
            map[s.layer][s.slot] = fail ? -1 : s.expert;
        }
        flying.pop_front();
    }

    std::vector<policy::swap> step(const std::vector<std::vector<std::vector<int32_t>>> & tokens, bool fail = false) { // [token][layer]
        while ((int) flying.size() >= delay) {
            land(fail);
        }
        check();
        for (size_t l = 0; l < shape.size(); l++) {
            used[l].clear();
        }
        for (const auto & t : tokens) {
            for (size_t l = 0; l < shape.size(); l++) {
                for (const int32_t e : t[l]) {
                    hits += pol.slot(l, e) >= 0;
                    lookups++;
                    used[l].insert(e);
                }
                pol.use(l, t[l].data(), t[l].size());
            }
        }
        now += tokens.size();
        pol.step(tokens.size());
        const auto plan = pol.plan();
        uploads += plan.size();
        std::set<std::pair<int, int>> slots, experts;
        for (const auto & s : plan) {
            CHECK(slots.insert({ s.layer, s.slot }).second);
            CHECK(experts.insert({ s.layer, s.expert }).second);
            CHECK(s.slot >= 0 && s.slot < shape[s.layer].n_slots);
            CHECK(map[s.layer][s.slot] == (s.victim < 0 ? -1 : s.victim)); // not in flight, and what it says is there
            CHECK(std::count(map[s.layer].begin(), map[s.layer].end(), s.expert) == 0);
            if (s.victim >= 0 && p.type == params::SCORE) {
                CHECK(used[s.layer].count(s.victim) == 0);
                CHECK(used[s.layer].count(s.expert) == 1);
                CHECK(now - since[s.layer][s.slot] >= p.dwell);
            }
            map[s.layer][s.slot]   = -2;
            since[s.layer][s.slot] = now;
        }
        if (p.deterministic || p.budget > 0) {
            CHECK((int) plan.size() <= (p.deterministic ? 8 : p.budget));
        }
        check();
        flying.push_back(plan);
        return plan;
    }

    std::vector<policy::swap> step(router & r, int n_tokens = 1, bool fail = false) {
        std::vector<std::vector<std::vector<int32_t>>> tokens(n_tokens);
        for (auto & t : tokens) {
            for (size_t l = 0; l < shape.size(); l++) {
                t.push_back(r.token(l));
            }
        }
        return step(tokens, fail);
    }

    double rate(router & r, int n) { // of the next n tokens
        const double h = hits, l = lookups;
        for (int i = 0; i < n; i++) {
            step(r);
        }
        return (hits - h)/(lookups - l);
    }
};

static std::vector<policy::layer> same(int n, int n_expert, int n_slots, uint64_t bytes = 1000) {
    return std::vector<policy::layer>(n, { n_expert, n_slots, bytes });
}

static void test_invariants() {
    for (int seed = 0; seed < 24; seed++) {
        params p;
        p.type          = seed % 5 == 4 ? params::LRU : params::SCORE;
        p.budget        = seed % 2 ? 1 + seed : 0;
        p.deterministic = seed % 7 == 6;
        p.sticky        = seed % 3 == 2 ? 0.5f : 0.0f;
        p.dwell         = seed % 4;
        bed b(p, { { 32, 8, 1000 }, { 32, 32, 500 }, { 64, 5, 2000 }, { 16, 0, 1 }, { 8, 100, 3000 } }, p.deterministic ? 1 : 1 + seed % 3);
        b.map[4].resize(8); // more slots than experts: the rest stay unused
        b.shape[4].n_slots = 8;
        router r(8, 2, 2, 0.2, seed);
        for (int i = 0; i < 400; i++) {
            r.topic = i/100 % 2;
            b.step(r, i % 17 == 0 ? 1 + i % 4 : 1, i % 23 == 0);
            if (seed % 3 == 0) {
                b.pol.time_step(1000 + i % 7);
                b.pol.time_upload(1000, 10 + i % 5);
            }
        }
    }
}

static void test_odd_input() {
    bed b({}, same(1, 8, 4));
    const int32_t ids[] = { -1, 3, -7, 8, 100, 5 };
    b.pol.use(0, ids, 6);
    b.pol.use(0, nullptr, 0);
    b.pol.step(0);
    b.pol.step(1);
    CHECK(b.pol.count(0).lookups == 2);
    CHECK(b.pol.plan().size() == 2);
    CHECK(b.pol.slot(0, -1) == -1 && b.pol.slot(0, 8) == -1 && b.pol.expert(0, -1) == -1 && b.pol.expert(0, 4) == -1);
    b.pol.time_step(0);
    b.pol.time_step(-5);
    b.pol.time_upload(0, 5);
    CHECK(b.pol.step_us() == 0.0 && b.pol.upload_us(100) == 0.0);
    policy none({}, {});
    none.step(1);
    CHECK(none.plan().empty());
}

static void test_lru() {
    params p;
    p.type   = params::LRU;
    p.budget = 1 << 30;
    for (const int slots : { 4, 7, 16 }) {
        bed b(p, same(2, 32, slots));
        router r(32, 4, 2, 0.3, slots);
        std::list<int32_t> naive[2]; // the last is the newest
        for (int i = 0; i < 500; i++) {
            std::vector<std::vector<int32_t>> t = { r.token(0), r.token(1) };
            r.topic = i/50 % 2;
            b.step({ t });
            while (!b.flying.empty()) {
                b.land();
            }
            for (int l = 0; l < 2; l++) {
                for (const int32_t e : t[l]) {
                    naive[l].remove(e);
                    naive[l].push_back(e);
                }
                while ((int) naive[l].size() > slots) {
                    naive[l].pop_front();
                }
                for (int e = 0; e < 32; e++) {
                    CHECK((b.pol.slot(l, e) >= 0) == (std::count(naive[l].begin(), naive[l].end(), e) == 1));
                }
            }
        }
    }
}

static void test_deterministic() {
    params p;
    p.deterministic = true;
    std::vector<std::vector<policy::swap>> first;
    for (int run = 0; run < 2; run++) {
        bed b(p, same(6, 32, 8));
        router r(32, 4, 4, 0.1, 1);
        size_t most = 0;
        for (int i = 0; i < 600; i++) {
            r.topic = i/60 % 4;
            b.pol.time_step(1 + 999*run + i);
            b.pol.time_upload(1000, 1 + 100000*run);
            const auto plan = b.step(r);
            most = std::max(most, plan.size());
            for (size_t k = 1; k < plan.size(); k++) {
                CHECK(plan[k - 1].layer < plan[k].layer || (plan[k - 1].layer == plan[k].layer && plan[k - 1].slot < plan[k].slot));
            }
            if (run == 0) {
                first.push_back(plan);
                continue;
            }
            CHECK(plan.size() == first[i].size());
            for (size_t k = 0; k < plan.size(); k++) {
                CHECK(memcmp(&plan[k], &first[i][k], sizeof(plan[k])) == 0);
            }
        }
        CHECK(most == 8);
    }
}

static void test_free_slots() {
    params p;
    p.budget = 3;
    p.margin = 1e9f; // no eviction
    bed b(p, same(1, 64, 16));
    router r(64, 4, 1, 0, 1);
    for (int i = 0; i < 10; i++) {
        const auto plan = b.step(r);
        CHECK((int) plan.size() == (i < 5 ? 3 : i == 5 ? 1 : 0));
        for (const auto & s : plan) {
            CHECK(s.victim == -1);
        }
    }
}

static void test_failure() {
    bed b({}, same(1, 8, 2));
    const std::vector<std::vector<std::vector<int32_t>>> t = { { { 1, 2 } } };
    CHECK(b.step(t).size() == 2);
    b.land(true);
    CHECK(b.pol.count(0).failed == 2);
    for (int i = 0; i < 62; i++) {
        CHECK(b.step(t).empty());
    }
    const auto other = b.step({ { { 3, 4 } } }); // the slots are free for others
    CHECK(other.size() == 2);
    b.land(true);
    b.step(t);
    CHECK(b.flying.back().size() == 2); // and the first ones have waited long enough
}

static void test_fairness() {
    params p;
    p.budget = 1;
    bed b(p, same(5, 64, 32));
    router r(64, 8, 1, 0, 3);
    std::vector<int> n(5);
    for (int i = 0; i < 50; i++) {
        for (const auto & s : b.step(r)) {
            n[s.layer]++;
        }
    }
    for (const int x : n) {
        CHECK(x == 10);
    }
}

static void test_budget() {
    params p;
    p.swap_frac = 0.25f;
    bed b(p, same(4, 256, 128, 1000));
    router r(256, 8, 1, 0, 3);
    CHECK(b.step(r).size() == 4); // careful before anything is known
    int n = 0;
    for (int i = 0; i < 200; i++) {
        b.pol.time_step(1000);
        b.pol.time_upload(1000, 400); // 0.625 uploads a step
        n += b.step(r).size();
    }
    CHECK(n >= 123 && n <= 125 + 4);
    CHECK(b.pol.step_us() > 999 && b.pol.step_us() < 1001 && b.pol.upload_us(2000) > 799 && b.pol.upload_us(2000) < 801);
    for (int i = 0; i < 100; i++) {
        b.pol.time_step(1000);
        b.pol.step(1); // nothing is uploaded
    }
    while (!b.flying.empty()) {
        b.land();
    }
    CHECK(b.pol.plan().size() <= 3); // what is left over is kept for a few steps only
}

static int swaps_when_an_upload_takes(int64_t us) {
    params p;
    p.swap_frac = 1e6f; // the budget refuses nothing
    bed b(p, same(1, 64, 8, 1000));
    router r(64, 4, 8, 0.0, 5);
    int n = 0;
    for (int i = 0; i < 800; i++) {
        r.topic = i/100 % 8;
        b.pol.time_step(1000);
        b.pol.time_upload(1000, us);
        for (const auto & s : b.step(r)) {
            n += s.victim >= 0;
        }
    }
    return n;
}

static void test_pay_back() {
    const int fast = swaps_when_an_upload_takes(10);
    const int slow = swaps_when_an_upload_takes(200000); // a hit saves a millisecond at most
    fprintf(stderr, "evictions: %d when uploads are fast, %d when they are slow\n", fast, slow);
    CHECK(fast >= 40);
    CHECK(slow == 0);
}

static void test_topic_switch() {
    params p;
    p.budget = 1 << 30;
    bed b(p, same(4, 64, 16));
    router r(64, 4, 4, 0.05, 9);
    for (int topic = 0; topic < 4; topic++) {
        r.topic = topic;
        const double during = b.rate(r, 32);
        const double after  = b.rate(r, 16);
        b.rate(r, 400);
        const double steady = b.rate(r, 200);
        fprintf(stderr, "hits: %.2f in the first 32 tokens of a topic, %.2f in the next 16, %.2f at last\n", during, after, steady);
        CHECK(steady > 0.9);
        CHECK(after > 0.9*steady);
    }
}

static void test_price() { // without it noise alone makes an upload for each hit or two
    for (const float earn : { 0.0f, 6.0f }) {
        params p;
        p.budget = 1 << 30;
        p.margin = 0.0f;
        p.earn   = earn;
        bed b(p, same(2, 64, 16));
        router r(64, 4, 1, 0, 9);
        b.rate(r, 500);
        const double u = b.uploads, h = b.hits;
        const double rate = b.rate(r, 2000);
        const double each = (b.hits - h)/(b.uploads - u);
        fprintf(stderr, "noise, earn %.0f: %.3f hits (chance 0.25), %.1f hits an upload\n", earn, rate, each);
        CHECK(rate > 0.23 && rate < 0.27);
        CHECK(earn > 0.0f ? each >= 5.7 : each < 4.0);
    }
}

static void test_sticky() {
    params p;
    p.budget = 1 << 30;
    p.sticky = 0.5f;
    bed b(p, same(1, 64, 8));
    router r(64, 4, 8, 0.0, 9);
    b.rate(r, 2000);
    r.topic = 3;
    b.rate(r, 300);
    int there = 0;
    for (int e = 0; e < 8; e++) {
        there += b.pol.slot(0, e) >= 0;
    }
    CHECK(there == 4);
}

static void test_drafts() { // what rejected drafts used counts less
    params p;
    p.budget = 1 << 30;
    policy pol(p, same(1, 16, 2));
    const int32_t real[] = { 0, 1 }, drafted[] = { 2, 3 };
    for (int i = 0; i < 50; i++) {
        pol.use(0, real, 2);
        pol.use(0, drafted, 2, 0.1f);
        pol.step(2);
        for (const auto & s : pol.plan()) {
            pol.landed(s);
        }
    }
    CHECK(pol.slot(0, 0) >= 0 && pol.slot(0, 1) >= 0);
    CHECK(pol.score(0, 0) > 5*pol.score(0, 2));
}

int main(int argc, char ** argv) {
    const struct { const char * name; void (*run)(); } cases[] = {
        { "invariants",    test_invariants    },
        { "odd-input",     test_odd_input     },
        { "lru",           test_lru           },
        { "deterministic", test_deterministic },
        { "free-slots",    test_free_slots    },
        { "failure",       test_failure       },
        { "fairness",      test_fairness      },
        { "budget",        test_budget        },
        { "pay-back",      test_pay_back      },
        { "topic-switch",  test_topic_switch  },
        { "price",         test_price         },
        { "sticky",        test_sticky        },
        { "drafts",        test_drafts        },
    };
    int n = 0;
    for (const auto & c : cases) {
        bool asked = argc == 1;
        for (int i = 1; i < argc; i++) {
            asked = asked || strcmp(argv[i], c.name) == 0;
        }
        if (asked) {
            c.run();
            fprintf(stderr, "%s: done\n", c.name);
            n++;
        }
    }
    return n >= std::max(1, argc - 1) ? 0 : 1;
}
