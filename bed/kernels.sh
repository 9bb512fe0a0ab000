# What all beds know of Linux under QEMU without KVM. Sourced by bed/run and bed/served.sh.

# On a busy machine a kernel may take its timer or its clock for a broken one, and give up, or patch its own code, which QEMU's
# threads do not always survive: it is not to look. The rest is a third of the boot: what a kernel does against attackers that an
# emulated processor cannot have, tests of its own cryptography, and grace periods that nobody hurries.
fewer="tsc=reliable no_timer_check mitigations=off cryptomgr.notests rcupdate.rcu_expedited=1"

# died_of_qemu SERIAL: whether the kernel gave up for a reason that is QEMU's, so that the guest may be booted once more: before
# anything of ours ran in it, or at a breakpoint of its own. It sets one where it patches its code while it runs, and takes it away
# when all processors have seen that; a thread of QEMU's may meet it later. Nothing of ours sets any.
died_of_qemu() {
    grep -aq 'Kernel panic' "$1" || return 1
    grep -aq 'Oops: int3' "$1" || ! grep -aqE '^(==|PASS|FAIL|SKIP)' "$1"
}
