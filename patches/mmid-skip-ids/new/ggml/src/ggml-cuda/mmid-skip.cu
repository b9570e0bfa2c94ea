// SPDX-License-Identifier: MIT

#include "common.cuh"
#include "mmid-skip.cuh"

// One warp for each expert, and one more for the ids that are skipped: they act as an expert behind the last.
__launch_bounds__(ggml_cuda_get_physical_warp_size(), 1)
static __global__ void mm_ids_helper_skip(
        const int32_t * __restrict__ ids, int32_t * __restrict__ ids_src1, int32_t * __restrict__ ids_dst, int32_t * __restrict__ expert_bounds,
        const int n_tokens, const int n_expert_used, const int nchannels_y, const int si1, const int sis1, const bool write_inverse) {
    constexpr int warp_size = ggml_cuda_get_physical_warp_size();

    const int expert    = blockIdx.x;
    const int n_experts = gridDim.x - 1;
    const int n_slots   = n_tokens*n_expert_used;

    const auto expert_of = [&](const int slot) {
        const int id = ids[(slot / n_expert_used)*si1 + slot % n_expert_used];
        return id < 0 ? n_experts : id;
    };

    int nex_prev = 0; // Number of slots with a lower expert.
    for (int slot = threadIdx.x; slot < n_slots; slot += warp_size) {
        nex_prev += expert_of(slot) < expert;
    }
    nex_prev = warp_reduce_sum<warp_size>(nex_prev);

    int nex = 0; // Running number of slots with this expert.
    for (int slot0 = 0; slot0 < n_slots; slot0 += warp_size) {
        const int slot  = slot0 + threadIdx.x;
        const int found = slot < n_slots && expert_of(slot) == expert;
        const int upto  = warp_prefix_inclusive_sum<int, warp_size>(found);

        if (found) {
            const int it  = slot / n_expert_used;
            const int iex = slot % n_expert_used;
            const int row = nex_prev + nex + upto - 1;

            ids_dst[row] = slot;
            if (write_inverse) {
                ids_src1[slot] = row;
            } else {
                ids_src1[row] = it*sis1 + iex % nchannels_y;
            }
        }

        nex += __shfl_sync(0xFFFFFFFF, upto, warp_size - 1, warp_size);
    }

    if (threadIdx.x == 0) {
        expert_bounds[expert] = nex_prev;
    }
}

void ggml_cuda_launch_mm_ids_helper_skip(
        const int32_t * ids, int32_t * ids_src1, int32_t * ids_dst, int32_t * expert_bounds,
        const int n_experts, const int n_tokens, const int n_expert_used, const int nchannels_y, const int si1, const int sis1,
        const bool write_inverse, cudaStream_t stream) {
    const int warp_size = ggml_cuda_info().devices[ggml_cuda_get_device()].warp_size;

    mm_ids_helper_skip<<<n_experts + 1, warp_size, 0, stream>>>
        (ids, ids_src1, ids_dst, expert_bounds, n_tokens, n_expert_used, nchannels_y, si1, sis1, write_inverse);
}
