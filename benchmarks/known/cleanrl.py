"""CleanRL: PPO on Atari; gradients are averaged by hand."""

from made import write

REPOSITORY = "vwxyzjn/cleanrl"
COMMIT = "fe8d8a03"
PACKAGES = ["gymnasium==0.29.1", "ale-py", "opencv-python-headless", "tyro", "rich", "tensorboard"]
EDITS = [
    ("cleanrl/ppo_atari_multigpu.py", "make(env_id)", "make(env_id, disable_env_checker=True)"),
    (
        "cleanrl/ppo_atari_multigpu.py",
        "import gymnasium as gym",
        "import atari_games, gymnasium as gym",
    ),
    ("cleanrl/ppo_atari_multigpu.py", "4, 32, 8", "4, 4, 8"),
    ("cleanrl/ppo_atari_multigpu.py", "32, 64, 4", "4, 4, 4"),
    ("cleanrl/ppo_atari_multigpu.py", "64, 64, 3", "4, 4, 3"),
    ("cleanrl/ppo_atari_multigpu.py", "64 * 7 * 7, 512", "4 * 7 * 7, 16"),
    ("cleanrl/ppo_atari_multigpu.py", "layer_init(nn.Linear(512, ", "layer_init(nn.Linear(16, "),
]
COMMAND = """--cpu --wait 400 --steps 6 --one "--local-num-envs 4" cleanrl/ppo_atari_multigpu.py
    --local-num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --total-timesteps 400"""

if __name__ == "__main__":
    # Of this version of gymnasium, with the games of today's ale_py.
    write("atari_games.py", "from ale_py import registration\nregistration.register_v0_v4_envs()\n")
