// SPDX-License-Identifier: MIT

#include "llama-expert-policy.h"
#include "llama-expert-score.h"

#include <algorithm>

static const float   PRICE_STEP    = 0.2f;   // uses, for one eviction
static const int32_t BUDGET_START  = 4;      // uploads in a step before the link was measured
static const int32_t BUDGET_FIXED  = 8;      // deterministic
static const float   MARGIN_FIXED  = 4.0f;
static const double  CARRY         = 4.0;    // steps whose unused share of the link is kept
static const int32_t IN_FLIGHT_MAX = 256;    // uploads, when they are bounded by time alone
static const double  SMOOTH        = 1.0/16;

namespace {

// a running mean of what is divided: sum of amounts and sum of counts fade alike
struct smoothed_rate {
    double amount = 0.0;
    double count  = 0.0;

    void add(double a, double c) {
        amount += SMOOTH*(a - amount);
        count  += SMOOTH*(c - count);
    }

    double get() const { return count > 0.0 ? amount/count : 0.0; }
};

struct layer_state {
    llama_expert_policy::layer  shape;
    llama_expert_policy::counts n = {};

    std::unique_ptr<llama_expert_score> score; // none with LRU

    // by expert
    std::vector<uint64_t> last;    // order of the last use, over all tokens; 0: never
    std::vector<int64_t>  used_at; // step of the last use
    std::vector<int64_t>  wait;    // token before which it is not asked for again
    std::vector<int32_t>  slot;    // -1: not resident
    std::vector<uint8_t>  coming;  // in flight
    std::vector<uint8_t>  sticks;

    // by slot
    std::vector<int32_t>  expert;  // -1: free; also set in flight
    std::vector<int64_t>  since;   // token of the plan

    std::vector<int32_t>  scratch;

    float  price  = 0.0f; // uses; below 0: saved up
    float  hits   = 0.0f; // of this step
    float  misses = 0.0f;
    bool   done   = false; // nothing more in this plan

    void init(const llama_expert_policy::layer & s);
    void stick(int32_t n);
};

void layer_state::init(const llama_expert_policy::layer & s) {
    shape = s;
    shape.n_expert = std::max(0, s.n_expert);
    shape.n_slots  = std::max(0, std::min(s.n_slots, shape.n_expert));
    last.assign(shape.n_expert, 0);
    used_at.assign(shape.n_expert, -1);
    wait.assign(shape.n_expert, 0);
    slot.assign(shape.n_expert, -1);
    coming.assign(shape.n_expert, 0);
    sticks.assign(shape.n_expert, 0);
    expert.assign(shape.n_slots, -1);
    since.assign(shape.n_slots, 0);
    scratch.reserve(shape.n_expert);
}

// the n most used ones are not evicted
void layer_state::stick(int32_t n) {
    scratch.resize(shape.n_expert);
    for (int32_t e = 0; e < shape.n_expert; e++) {
        scratch[e] = e;
        sticks[e]  = 0;
    }
    const auto & life = score->life;
    std::nth_element(scratch.begin(), scratch.begin() + n, scratch.end(), [&](int32_t a, int32_t b) {
        return life[a] != life[b] ? life[a] > life[b] : a < b;
    });
    for (int32_t i = 0; i < n; i++) {
        sticks[scratch[i]] = life[scratch[i]] > 0.0f;
    }
}

} // namespace

struct llama_expert_policy::impl {
    llama_expert_policy_params params;
    std::vector<layer_state> layers;

    int64_t  n_tokens = 0;
    int64_t  n_steps  = 0;
    uint64_t n_uses   = 0;

    smoothed_rate us_step;   // per step
    smoothed_rate us_byte;   // per byte
    smoothed_rate n_misses;  // per step, over all layers
    double  credit    = 0.0;     // us of the link that uploads may take
    int32_t in_flight = 0;
    size_t  first     = 0;       // layer that is asked first

    bool score() const { return params.type == llama_expert_policy_params::SCORE; }
    bool timed() const { return params.budget <= 0 && !params.deterministic && us_step.get() > 0.0 && us_byte.get() > 0.0; }

    float lead(const layer_state & l) const;
    bool  can_go(const layer_state & l, int32_t slot) const;
    bool  pick(layer_state & l, int32_t il, swap & s) const;
    void  take(layer_state & l, const swap & s);
};

// uses by which a newcomer has to lead its victim
float llama_expert_policy::impl::lead(const layer_state & l) const {
    if (params.deterministic) {
        return MARGIN_FIXED;
    }
    float out = std::max(params.margin, l.price);
    if (us_step.get() > 0.0 && n_misses.get() > 0.0) {
        const double us_hit = us_step.get()/n_misses.get(); // what a hit saves, at most
        out = std::max(out, (float) (us_byte.get()*l.shape.bytes/us_hit));
    }
    return out;
}

bool llama_expert_policy::impl::can_go(const layer_state & l, int32_t slot) const {
    const int32_t e = l.expert[slot];
    if (e < 0 || l.coming[e]) {
        return false;
    }
    return !score() || (l.used_at[e] < n_steps - 1 && n_tokens - l.since[slot] >= params.dwell && !l.sticks[e]);
}

// the layer's best swap, if it is worth one
bool llama_expert_policy::impl::pick(layer_state & l, int32_t il, swap & s) const {
    const auto before = [&](int32_t a, int32_t b) { // a is worth more
        if (!score()) {
            return l.last[a] > l.last[b];
        }
        if (l.sticks[a] != l.sticks[b]) {
            return l.sticks[a] > l.sticks[b];
        }
        return l.score->score[a] > l.score->score[b];
    };
    s = { il, -1, -1, -1 };
    for (int32_t i = 0; i < l.shape.n_slots && s.slot < 0; i++) {
        s.slot = l.expert[i] < 0 ? i : -1;
    }
    for (int32_t e = 0; e < l.shape.n_expert; e++) {
        const bool wanted = l.used_at[e] == n_steps - 1 || (score() && s.slot >= 0 && l.last[e] > 0);
        if (wanted && l.slot[e] < 0 && !l.coming[e] && l.wait[e] <= n_tokens && (s.expert < 0 || before(e, s.expert))) {
            s.expert = e;
        }
    }
    if (s.slot >= 0 || s.expert < 0) {
        return s.expert >= 0;
    }
    for (int32_t i = 0; i < l.shape.n_slots; i++) {
        if (can_go(l, i) && (s.slot < 0 || before(s.victim, l.expert[i]))) {
            s.slot   = i;
            s.victim = l.expert[i];
        }
    }
    if (s.slot < 0) {
        return false;
    }
    if (!score()) {
        return l.last[s.expert] > l.last[s.victim];
    }
    return l.sticks[s.expert] || l.score->score[s.expert] > l.score->score[s.victim] + lead(l);
}

void llama_expert_policy::impl::take(layer_state & l, const swap & s) {
    if (s.victim >= 0) {
        l.slot[s.victim] = -1;
        l.price += params.earn > 0.0f ? PRICE_STEP : 0.0f;
        l.n.evicted++;
    }
    l.n.planned++;
    l.expert[s.slot]   = s.expert;
    l.since[s.slot]    = n_tokens;
    l.coming[s.expert] = 1;
    in_flight++;
}

llama_expert_policy::llama_expert_policy(const llama_expert_policy_params & params, const std::vector<layer> & layers) : self(new impl) {
    self->params = params;
    self->params.window = std::max(1, params.window);
    self->params.sticky = std::min(1.0f, std::max(0.0f, params.sticky));
    self->layers.resize(layers.size());
    for (size_t i = 0; i < layers.size(); i++) {
        self->layers[i].init(layers[i]);
        if (self->score()) {
            self->layers[i].score.reset(new llama_expert_score(self->layers[i].shape.n_expert, self->params.window, (int32_t) i));
        }
    }
}

llama_expert_policy::~llama_expert_policy() = default;

void llama_expert_policy::use(int32_t layer, const int32_t * ids, int32_t n_used, float weight) {
    layer_state & l = self->layers[layer];
    l.scratch.clear();
    for (int32_t i = 0; i < n_used; i++) {
        const int32_t e = ids[i];
        if (e < 0 || e >= l.shape.n_expert) {
            continue;
        }
        const bool hit = l.slot[e] >= 0;
        l.n.lookups++;
        l.n.hits += hit;
        (hit ? l.hits : l.misses) += weight;
        l.last[e]    = ++self->n_uses;
        l.used_at[e] = self->n_steps;
        l.scratch.push_back(e);
    }
    if (l.score) {
        l.score->use(l.scratch.data(), (int32_t) l.scratch.size(), weight);
    }
}

void llama_expert_policy::step(int32_t n_tokens) {
    impl & p = *self;
    if (n_tokens <= 0) {
        return;
    }
    p.n_tokens += n_tokens;
    p.n_steps++;
    double missed = 0.0;
    for (auto & l : p.layers) {
        if (l.score) {
            l.score->step(n_tokens);
        }
        if (l.score && p.params.sticky > 0.0f) {
            l.stick((int32_t) (p.params.sticky*l.shape.n_slots));
        }
        if (p.params.earn > 0.0f) { // what is saved up pays for an exchange of all slots
            l.price = std::max(-PRICE_STEP*l.shape.n_slots, l.price - PRICE_STEP*l.hits/p.params.earn);
        }
        missed += l.misses;
        l.hits   = 0.0f;
        l.misses = 0.0f;
    }
    p.n_misses.add(missed, 1.0);
    p.credit += p.params.swap_frac*p.us_step.get();
}

std::vector<llama_expert_policy::swap> llama_expert_policy::plan() {
    impl & p = *self;
    std::vector<swap> out;
    if (p.layers.empty()) {
        return out;
    }
    const bool timed = p.timed();
    int32_t most = p.params.deterministic ? BUDGET_FIXED : p.params.budget > 0 ? p.params.budget : BUDGET_START;
    if (timed) {
        // what one step left over helps the next, but a pause does not end in a flood; one upload always fits at last
        double largest = 0.0;
        for (const auto & l : p.layers) {
            largest = std::max(largest, upload_us(l.shape.bytes));
        }
        p.credit = std::min(p.credit, std::max(largest, CARRY*p.params.swap_frac*p.us_step.get()));
        most = IN_FLIGHT_MAX - p.in_flight;
    }
    for (auto & l : p.layers) {
        l.done = false;
    }
    // a layer for which the link has no time left is the first of the next plan
    size_t il   = p.first % p.layers.size();
    size_t left = p.layers.size();
    for (; (int32_t) out.size() < most && left > 0; il = (il + 1) % p.layers.size()) {
        layer_state & l = p.layers[il];
        const double cost = timed ? upload_us(l.shape.bytes) : 0.0;
        swap s;
        if (l.done) {
            continue;
        }
        if (cost > p.credit) {
            break;
        }
        if (!p.pick(l, (int32_t) il, s)) {
            l.done = true;
            left--;
            continue;
        }
        p.take(l, s);
        p.credit -= cost;
        out.push_back(s);
    }
    p.first = il;
    if (p.params.deterministic) {
        std::sort(out.begin(), out.end(), [](const swap & a, const swap & b) {
            return a.layer != b.layer ? a.layer < b.layer : a.slot < b.slot;
        });
    }
    return out;
}

void llama_expert_policy::landed(const swap & s) {
    layer_state & l = self->layers[s.layer];
    l.coming[s.expert] = 0;
    l.slot[s.expert]   = s.slot;
    self->in_flight--;
}

void llama_expert_policy::failed(const swap & s) {
    layer_state & l = self->layers[s.layer];
    l.coming[s.expert] = 0;
    l.expert[s.slot]   = -1;
    l.wait[s.expert]   = self->n_tokens + self->params.window;
    l.n.failed++;
    self->in_flight--;
}

void llama_expert_policy::time_step(int64_t us) {
    if (us > 0) {
        self->us_step.add((double) us, 1.0);
    }
}

void llama_expert_policy::time_upload(uint64_t bytes, int64_t us) {
    if (bytes > 0 && us >= 0) {
        self->us_byte.add(std::max(0.5, (double) us), (double) bytes);
    }
}

int32_t llama_expert_policy::slot(int32_t layer, int32_t expert) const {
    const layer_state & l = self->layers[layer];
    return expert >= 0 && expert < l.shape.n_expert ? l.slot[expert] : -1;
}

int32_t llama_expert_policy::expert(int32_t layer, int32_t slot) const {
    const layer_state & l = self->layers[layer];
    const int32_t e = slot >= 0 && slot < l.shape.n_slots ? l.expert[slot] : -1;
    return e >= 0 && !l.coming[e] ? e : -1;
}

llama_expert_policy::counts llama_expert_policy::count(int32_t layer) const {
    return self->layers[layer].n;
}

float llama_expert_policy::score(int32_t layer, int32_t expert) const {
    const auto & s = self->layers[layer].score;
    return s && expert >= 0 && expert < (int32_t) s->score.size() ? s->score[expert] : 0.0f;
}

double llama_expert_policy::step_us() const {
    return self->us_step.get();
}

double llama_expert_policy::upload_us(uint64_t bytes) const {
    return self->us_byte.get()*bytes;
}
