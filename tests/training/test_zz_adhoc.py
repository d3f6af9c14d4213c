import functools, signal, pytest, torch
from tests import ranks
from tests.training.test_resume import Outcome
from training.checkpoint import CheckpointFolder
from recipe import loading
G=("exchange.order=fast","exchange.method=gtopk","exchange.density=0.01","exchange.momentum_correction=true","precision.weights=float32")
def sig(at, rank):
    if rank==0: ranks.before_step(at, functools.partial(signal.raise_signal, signal.SIGTERM))
def test_it(tmp_path):
    a=ranks.train(2,*G,f"run.output={tmp_path/'a'}"); assert [r.code for r in a]==[0,0],a
    b=ranks.train(2,*G,f"run.output={tmp_path/'b'}",sabotage=functools.partial(sig,4)); assert [r.code for r in b]==[75,75],b
    print(sorted(p.name for p in (tmp_path/'b/checkpoints').iterdir()))
    b=ranks.train(2,*G,f"run.output={tmp_path/'b'}"); assert [r.code for r in b]==[0,0],b
    Outcome(tmp_path/'b').assert_same(Outcome(tmp_path/'a'))
    ca,cb=(CheckpointFolder(tmp_path/x/'checkpoints',9,True) for x in 'ab')
    for r in range(2):
        x,y=ca.replica_state(10,r),cb.replica_state(10,r)
        from tests.tensors import flat
        fx,fy=flat(x),flat(y); assert fx.keys()==fy.keys() and len(fx)>10
        assert all(torch.equal(fx[k],fy[k]) for k in fx); print(len(fx), sum(float(v.abs().sum()) for v in fx.values()))
    # without files of a replica
    for p in (tmp_path/'b/checkpoints').glob('*replica-0001*'): p.unlink()
    (tmp_path/'b/metrics.jsonl').write_text((tmp_path/'b/metrics.jsonl').read_text().rsplit('\n',2)[0]+'\n')
    c=ranks.train(2,*G,f"run.output={tmp_path/'b'}"); print(c)
