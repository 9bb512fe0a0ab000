# Settings for Linux under QEMU without KVM. Sourced by bed/run and bed/served.sh.

# On a busy machine a kernel may find its timer or clock broken and give up, or patch its own code, which QEMU's threads do not
# always survive: these checks are off. So is what takes a third of the boot: mitigations that an emulated CPU does not need,
# self-tests of cryptography, and long grace periods.
fewer="tsc=reliable no_timer_check mitigations=off cryptomgr.notests rcupdate.rcu_expedited=1"

# died_of_qemu SERIAL: whether the kernel failed because of QEMU, so that the guest may be booted once more: before our
# code ran, or at a breakpoint of its own. The kernel sets one where it patches its code at run time, and removes it
# when all CPUs have seen that; a QEMU thread may hit it later. Our code sets none.
died_of_qemu() {
    grep -aq 'Kernel panic' "$1" || return 1
    grep -aq 'Oops: int3' "$1" || ! grep -aqE '^(==|PASS|FAIL|SKIP)' "$1"
}
