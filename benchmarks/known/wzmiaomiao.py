"""A Chinese course on image classification: a ResNet on several GPUs."""

from made import image_folder

REPOSITORY = "WZMIAOMIAO/deep-learning-for-image-processing"
COMMIT = "2ecf2ee"
PATHS = ["pytorch_classification/train_multi_GPU"]
FOLDER = PATHS[0]
PACKAGES = ["tqdm", "tensorboard", "matplotlib"]
SCRIPT = f"{FOLDER}/train_multi_gpu_using_launch.py"
EDITS = [
    (SCRIPT, "RandomResizedCrop(224)", "RandomResizedCrop(32)"),
    (SCRIPT, "Resize(256)", "Resize(36)"),
    (SCRIPT, "CenterCrop(224)", "CenterCrop(32)"),
    (f"{FOLDER}/model.py", "[3, 4, 6, 3]", "[1, 1, 1, 1]"),
]
COMMAND = """--cpu --wait 400 --short 2 --steps 5 train_multi_gpu_using_launch.py --epochs 3
    --batch-size 4 --data-path data/train"""
VERDICTS = {
    "files utils.py:20": (
        "known deviation",
        "each rank writes the names of the classes: the same text to the same file",
        "read: read_split_data, which every rank calls",
    ),
}

if __name__ == "__main__":
    image_folder("data", train=55, val=5, classes=5, suffix="jpg")
