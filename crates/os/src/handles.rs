//! Handles for C: numbers that identify objects, never their addresses.
//!
//! A C program can pass anything as a handle: a closed one, one of another kind, an arbitrary number. A number is
//! looked up and never dereferenced, and numbers are never reused. So each of these is an error.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The bits that all handles have. No pointer of a program has them, so dereferencing a handle faults.
const MARK: usize = 0x6f68_0000_0000_0000;

const _: () = assert!(usize::BITS == 64, "handles are numbers of 64 bits");

type Objects = BTreeMap<usize, Arc<dyn Any + Send + Sync>>;

/// The objects of a library, by their handles.
pub struct Handles {
    objects: RwLock<Objects>,
    next: AtomicUsize,
}

impl Default for Handles {
    fn default() -> Self {
        Self::new()
    }
}

impl Handles {
    /// An empty table.
    #[must_use]
    pub const fn new() -> Self {
        Self { objects: RwLock::new(BTreeMap::new()), next: AtomicUsize::new(MARK + 1) }
    }

    fn read(&self) -> RwLockReadGuard<'_, Objects> {
        self.objects.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Objects> {
        self.objects.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a handle for an object. It is not zero.
    pub fn add<T: Send + Sync + 'static>(&self, object: T) -> usize {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.write().insert(handle, Arc::new(object));
        handle
    }

    /// The object of a handle; `None` if there is no such handle, or its object has another type. It stays as long as
    /// the result is used, even if its handle is removed meanwhile.
    #[must_use]
    pub fn get<T: Send + Sync + 'static>(&self, handle: usize) -> Option<Arc<T>> {
        let object = self.read().get(&handle)?.clone();
        object.downcast().ok()
    }

    /// Removes a handle. Its object is dropped with the result, or with the call of another thread that still uses it.
    pub fn remove<T: Send + Sync + 'static>(&self, handle: usize) -> Option<Arc<T>> {
        let mut objects = self.write();
        objects.get(&handle)?.downcast_ref::<T>()?;
        objects.remove(&handle)?.downcast().ok()
    }

    /// Keeps other threads from adding and removing while the result lives. A thread holds the handles while it forks:
    /// in the child, a lock of another thread would stay locked.
    #[must_use]
    pub fn hold(&self) -> HeldHandles<'_> {
        HeldHandles(self.write())
    }
}

/// See [`Handles::hold`].
pub struct HeldHandles<'a>(RwLockWriteGuard<'a, Objects>);

impl HeldHandles<'_> {
    /// All objects of a type.
    #[must_use]
    pub fn all<T: Send + Sync + 'static>(&self) -> Vec<Arc<T>> {
        self.0.values().filter_map(|object| object.clone().downcast().ok()).collect()
    }

    /// Invalidates all handles without dropping their objects, which belong to another process.
    pub fn disown(&mut self) {
        std::mem::forget(std::mem::take(&mut *self.0));
    }

    /// The same for all handles except those of objects of this type.
    pub fn disown_all_but<T: 'static>(&mut self) {
        self.0.retain(|_, object| {
            let stays = object.is::<T>();
            if !stays {
                std::mem::forget(object.clone());
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_live_handles_are_found() {
        let handles = Handles::new();
        let (number, text) = (handles.add(7_u32), handles.add(String::from("seven")));
        assert_eq!(handles.get::<u32>(number).as_deref(), Some(&7));
        assert_eq!(handles.get::<String>(text).as_deref().map(String::as_str), Some("seven"));
        // Of another kind, huge, zero, not used yet.
        assert!(handles.get::<u32>(text).is_none() && handles.get::<String>(number).is_none());
        for handle in [0, 1, MARK, text + 1, usize::MAX] {
            assert!(handles.get::<u32>(handle).is_none() && handles.remove::<u32>(handle).is_none());
        }
        assert!(handles.remove::<String>(number).is_none() && handles.get::<u32>(number).is_some());
        assert_eq!(handles.remove::<u32>(number).as_deref(), Some(&7));
        // Stale, and its number is not reused.
        assert!(handles.get::<u32>(number).is_none() && handles.remove::<u32>(number).is_none());
        assert_ne!(handles.add(8_u32), number);
    }

    #[test]
    fn an_object_in_use_outlives_its_handle() {
        let handles = Handles::new();
        let handle = handles.add(String::from("used"));
        let used = handles.get::<String>(handle).unwrap();
        drop(handles.remove::<String>(handle));
        assert_eq!(*used, "used");
    }

    #[test]
    fn of_many_threads_one_takes_an_object() {
        let handles = Handles::new();
        for _ in 0..if cfg!(miri) { 3 } else { 20 } {
            let handle = handles.add(String::from("one"));
            let taken = std::thread::scope(|scope| {
                let takers: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            let seen = handles.get::<String>(handle).is_some();
                            let taken = handles.remove::<String>(handle).is_some();
                            assert!(seen || !taken);
                            taken
                        })
                    })
                    .collect();
                takers.into_iter().map(|taker| taker.join().unwrap()).filter(|t| *t).count()
            });
            assert_eq!(taken, 1);
        }
    }

    // It leaks on purpose, which Miri would report.
    #[cfg(not(miri))]
    #[test]
    fn disowned_objects_are_neither_found_nor_dropped() {
        let (handles, object) = (Handles::new(), Arc::new(()));
        let (text, handle) = (handles.add(String::from("stays")), handles.add(object.clone()));
        handles.hold().disown_all_but::<String>();
        assert!(handles.get::<Arc<()>>(handle).is_none());
        assert_eq!(handles.get::<String>(text).as_deref().map(String::as_str), Some("stays"));
        assert_eq!(Arc::strong_count(&object), 2);
        let handle = handles.add(object.clone());
        handles.hold().disown();
        assert!(handles.get::<Arc<()>>(handle).is_none() && handles.get::<String>(text).is_none());
        assert_eq!(Arc::strong_count(&object), 3);
        assert!(handles.add(object) > handle);
    }
}
