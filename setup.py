"Build configuration, read from settings.ini so that it is written once."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

extras = {
    key.removesuffix("_requirements"): value.split()
    for key, value in settings.items()
    if key.endswith("_requirements")
}
user_extras = [name for name in extras if name != "dev"]
extras["all"] = sorted({need for name in user_extras for need in extras[name]})
extras["dev"] = extras["all"] + extras["dev"]

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    author_email=settings["author_email"],
    url=settings["git_url"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=settings["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
    ],
    packages=find_packages(include=["databloom", "databloom.*"]),
    include_package_data=True,
    python_requires=">=" + settings["min_python"],
    install_requires=settings["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": settings["console_scripts"].split(),
        "nbdev": [f"{settings['lib_name']}={settings['lib_name']}._modidx:d"],  # so that `names` in prose become links
    },
    zip_safe=False,
)
