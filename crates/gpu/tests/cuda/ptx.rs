//! Kernels for the tests, written by hand: they must not depend on the device code that is tested elsewhere.

/// `fill(to, words, seed)`, `copy(to, from, words)`, `ring(door, ack, times, nanoseconds)`,
/// `pair(sq_door, cq_door, times)`, `linger(nanoseconds)`, `late(to, words, nanoseconds)`, `invalid_store()`.
pub const TOOLS: &str = r"
.version 8.2
.target sm_80
.address_size 64

.visible .entry fill(.param .u64 to, .param .u32 words, .param .u32 seed)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [to]; ld.param.u32 %r0, [words]; ld.param.u32 %r1, [seed];
    mov.u32 %r2, %tid.x;
loop:
    setp.ge.u32 %p, %r2, %r0;
    @%p bra done;
    mad.lo.u32 %r3, %r2, 0x9e3779b1, %r1;
    mad.wide.u32 %d1, %r2, 4, %d0;
    st.global.u32 [%d1], %r3;
    mov.u32 %r4, %ntid.x;
    add.u32 %r2, %r2, %r4;
    bra loop;
done:
    ret;
}

.visible .entry copy(.param .u64 to, .param .u64 from, .param .u32 words)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<8>;
    ld.param.u64 %d0, [to]; ld.param.u64 %d1, [from]; ld.param.u32 %r0, [words];
    mov.u32 %r2, %tid.x;
loop:
    setp.ge.u32 %p, %r2, %r0;
    @%p bra done;
    mad.wide.u32 %d2, %r2, 4, %d1;
    ld.global.u32 %r3, [%d2];
    mad.wide.u32 %d3, %r2, 4, %d0;
    st.global.u32 [%d3], %r3;
    mov.u32 %r4, %ntid.x;
    add.u32 %r2, %r2, %r4;
    bra loop;
done:
    ret;
}

.visible .entry ring(.param .u64 door, .param .u64 ack, .param .u32 times, .param .u64 limit)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<8>;
    ld.param.u64 %d0, [door]; ld.param.u64 %d1, [ack]; ld.param.u32 %r0, [times]; ld.param.u64 %d2, [limit];
    mov.u64 %d3, %globaltimer;
    add.u64 %d2, %d2, %d3;
    mov.u32 %r1, 0;
next:
    add.u32 %r1, %r1, 1;
    setp.gt.u32 %p, %r1, %r0;
    @%p bra done;
    fence.acq_rel.sys;
    st.relaxed.mmio.sys.u32 [%d0], %r1;
wait:
    mov.u64 %d3, %globaltimer;
    setp.gt.u64 %p, %d3, %d2;
    @%p bra done;
    ld.acquire.sys.u32 %r2, [%d1];
    setp.ne.u32 %p, %r2, %r1;
    @%p bra wait;
    bra next;
done:
    ret;
}

.visible .entry pair(.param .u64 sq, .param .u64 cq, .param .u32 times)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [sq]; ld.param.u64 %d1, [cq]; ld.param.u32 %r0, [times];
    mov.u32 %r1, 0;
next:
    add.u32 %r1, %r1, 1;
    setp.gt.u32 %p, %r1, %r0;
    @%p bra done;
    st.relaxed.mmio.sys.u32 [%d1], %r1;
    fence.acq_rel.sys;
    st.relaxed.mmio.sys.u32 [%d0], %r1;
    fence.acq_rel.sys;
    bra next;
done:
    ret;
}

.visible .entry linger(.param .u64 limit)
{
    .reg .pred %p; .reg .b64 %d<4>;
    ld.param.u64 %d0, [limit];
    mov.u64 %d1, %globaltimer;
    add.u64 %d0, %d0, %d1;
more:
    mov.u64 %d1, %globaltimer;
    setp.lt.u64 %p, %d1, %d0;
    @%p bra more;
    ret;
}

.visible .entry late(.param .u64 to, .param .u64 words, .param .u64 limit)
{
    .reg .pred %p; .reg .b32 %r<2>; .reg .b64 %d<8>;
    ld.param.u64 %d0, [to]; ld.param.u64 %d1, [words]; ld.param.u64 %d2, [limit];
    mov.u64 %d3, %globaltimer;
    add.u64 %d2, %d2, %d3;
more:
    mov.u64 %d3, %globaltimer;
    setp.lt.u64 %p, %d3, %d2;
    @%p bra more;
    mov.u32 %r0, %tid.x;
    cvt.u64.u32 %d4, %r0;
    mov.u32 %r0, %ntid.x;
    cvt.u64.u32 %d5, %r0;
    mov.u32 %r1, 7;
next:
    setp.ge.u64 %p, %d4, %d1;
    @%p bra done;
    shl.b64 %d6, %d4, 2;
    add.u64 %d6, %d6, %d0;
    st.global.u32 [%d6], %r1;
    add.u64 %d4, %d4, %d5;
    bra next;
done:
    ret;
}

.visible .entry invalid_store()
{
    .reg .b32 %r<2>; .reg .b64 %d<2>;
    mov.u64 %d0, 64;
    mov.u32 %r0, 1;
    st.global.u32 [%d0], %r0;
    ret;
}
";

/// Kernels with the device code's names. Each warp of `onehop_owner` waits for the poison word or the job's limit; each
/// warp of `onehop_shared` ends at once; the others mark the queues' control memory.
pub const STAND_IN: &str = r"
.version 8.2
.target sm_80
.address_size 64

.visible .entry onehop_owner(
    .param .u64 queues, .param .u64 exits, .param .align 8 .b8 job[88], .param .u32 warps)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<10>;
    mov.u32 %r0, %tid.x;
    setp.ne.u32 %p, %r0, 0;
    @%p bra done;
    ld.param.u64 %d0, [exits]; ld.param.u64 %d2, [job+16]; ld.param.u64 %d3, [job+80];
    mov.u32 %r1, %ctaid.x;
    mad.wide.u32 %d0, %r1, 8, %d0;
    mov.u64 %d4, %globaltimer;
    add.u64 %d3, %d3, %d4;
more:
    ld.acquire.sys.u32 %r2, [%d2];
    setp.ne.u32 %p, %r2, 0;
    @%p bra poisoned;
    mov.u64 %d4, %globaltimer;
    setp.lt.u64 %p, %d4, %d3;
    @%p bra more;
    mov.u32 %r3, 2;
    mov.u32 %r2, 0;
    bra store;
poisoned:
    mov.u32 %r3, 3;
store:
    st.global.u32 [%d0], %r3;
    st.global.u32 [%d0+4], %r2;
done:
    ret;
}

.visible .entry onehop_single(
    .param .u64 queues, .param .u64 exits, .param .align 8 .b8 job[88], .param .u32 warps)
{
    ret;
}

.visible .entry onehop_owner_prepare(.param .u64 queues, .param .u32 count)
{
    .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %d<4>;
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r0, %tid.x;
    mad.lo.u32 %r1, %r2, %r3, %r0;
    ld.param.u32 %r0, [count];
    setp.ge.u32 %p, %r1, %r0;
    @%p bra done;
    ld.param.u64 %d0, [queues];
    mad.wide.u32 %d0, %r1, 56, %d0;
    ld.global.u64 %d1, [%d0+32];
    add.u32 %r1, %r1, 100;
    st.global.u32 [%d1], %r1;
done:
    ret;
}

.visible .entry onehop_shared(
    .param .u64 queues, .param .u64 exits, .param .align 8 .b8 job[88], .param .u32 warps, .param .u32 count)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [exits]; ld.param.u32 %r0, [warps];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    shr.u32 %r1, %r1, 5;
    setp.ge.u32 %p, %r1, %r0;
    @%p bra done;
    mad.wide.u32 %d0, %r1, 8, %d0;
    mov.u32 %r4, 1;
    st.global.u32 [%d0], %r4;
done:
    ret;
}

.visible .entry onehop_shared_prepare(.param .u64 queues, .param .u32 count)
{
    .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %d<4>;
    mov.u32 %r0, %tid.x;
    setp.ne.u32 %p, %r0, 0;
    @%p bra done;
    ld.param.u64 %d0, [queues];
    ld.global.u64 %d1, [%d0+32];
    mov.u32 %r1, 200;
    st.global.u32 [%d1], %r1;
done:
    ret;
}
";
