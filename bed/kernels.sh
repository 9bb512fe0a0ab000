# Settings for Linux under QEMU without KVM. Sourced by bed/run and bed/served.sh.

# On a busy machine a kernel may find its timer or clock broken and give up, or patch its own code, which QEMU's threads do not
# always survive: these checks are off. So is what takes a third of the boot: mitigations that an emulated CPU does not need,
# self-tests of cryptography, and long grace periods.
fewer="tsc=reliable no_timer_check mitigations=off cryptomgr.notests rcupdate.rcu_expedited=1"

# died_of_qemu SERIAL: whether the kernel gave up for a reason that is QEMU's, so that the guest may be booted once more: before
# anything of ours ran in it, or at a breakpoint of its own. It sets one where it patches its code while it runs, and takes it away
# when all processors have seen that; a thread of QEMU's may meet it later. Nothing of ours sets any.
died_of_qemu() {
    grep -aq 'Kernel panic' "$1" || return 1
    grep -aq 'Oops: int3' "$1" || ! grep -aqE '^(==|PASS|FAIL|SKIP)' "$1"
}
